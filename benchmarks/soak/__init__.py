"""The long run: what grows, leaks or differs while the image is used and abused for minutes."""
