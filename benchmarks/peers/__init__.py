"""amptrain's step beside what people would use in its place."""
