"""Draw a plot to PNG, PDF and SVG without a display."""

import io

import matplotlib.pyplot as plt

figure, axes = plt.subplots()
axes.plot([1, 2, 3], label=r"loss $\frac{1}{n}$")
axes.legend()
for kind, begin in {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}.items():
    file = io.BytesIO()
    figure.savefig(file, format=kind)
    assert file.getvalue().startswith(begin), kind
