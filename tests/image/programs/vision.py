"""torchvision's compiled operators, and image files by torchvision and by Pillow."""

import io

import numpy as np
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_image, encode_jpeg, encode_png
from torchvision.ops import nms
from torchvision.transforms import v2

boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 11, 11], [50, 50, 60, 60]])
assert nms(boxes, torch.tensor([0.9, 0.8, 0.7]), 0.5).tolist() == [0, 2]

image = (
    torch.arange(3 * 32 * 32, dtype=torch.int32).remainder(256).to(torch.uint8).reshape(3, 32, 32)
)
assert torch.equal(decode_image(encode_png(image)), image)
assert decode_image(encode_jpeg(image), ImageReadMode.GRAY).shape == (1, 32, 32)

for kind in ("PNG", "JPEG", "WEBP", "TIFF", "BMP"):
    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, kind)
    read = np.asarray(Image.open(io.BytesIO(file.getvalue())))
    assert read.shape == (32, 32, 3), kind
assert v2.Resize((8, 8), antialias=True)(image).shape == (3, 8, 8)
