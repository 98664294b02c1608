"""Mixed-precision training done right. Reads in this order: cli, config, train, precision, data,
model, schedule."""
