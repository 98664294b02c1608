"""A trained model in use: one file holds it (model_file), and predict, evaluate and export read
that file."""
