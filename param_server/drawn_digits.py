"""Drawn digits (`--dataset synthetic`), for machines that cannot download MNIST.

Runs in every process that reads data.  The same seed gives the same digits in every process.  Pillow draws each digit
once for each font and size.  An image is one of these glyphs, moved, turned, sheared and scaled at random, with noise.
One `grid_sample` makes many images at once.  Accuracies on these digits cannot be compared with those on MNIST.

Shapes: N images, G glyphs, 28 x 28 pixels.
"""

import os

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

FONTS = ["DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSansMono"]
FONTS += ["STIXGeneral", "STIXGeneralItalic", "cmr10"]
SIZES = (20, 24)  # height of the font in pixels
CHUNK = 5_000  # images at a time, to limit the memory of the sampling grid


def draw_digits(count, seed):
    """Return (images (count, 28, 28) uint8, labels (count,) int64).  The same seed gives the same images."""
    glyphs_G28 = _glyphs()
    fonts = len(glyphs_G28) // 10
    random = torch.Generator().manual_seed(seed)
    labels_N = torch.randint(0, 10, (count,), generator=random)
    glyph_N = torch.randint(0, fonts, (count,), generator=random) * 10 + labels_N
    return torch.cat([_distort(glyphs_G28[part], random) for part in glyph_N.split(CHUNK)]), labels_N


def _glyphs():
    """Return glyphs (G, 28, 28), float32 from 0 to 1.  Glyph 10 * f + d is digit d in font f.

    The fonts are those that matplotlib brings, so they are the same on every machine.
    """
    import matplotlib

    folder = os.path.join(matplotlib.get_data_path(), "fonts", "ttf")
    fonts = [ImageFont.truetype(os.path.join(folder, f"{name}.ttf"), size) for name in FONTS for size in SIZES]
    pixels = []
    for font in fonts:
        for digit in "0123456789":
            image = Image.new("L", (28, 28))
            ImageDraw.Draw(image).text((14, 14), digit, fill=255, font=font, anchor="mm")
            pixels.append(torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(28, 28))
    return torch.stack(pixels).float() / 255


def _distort(glyphs_N28, random):
    """Return uint8 images (N, 28, 28): each glyph distorted at random, with random noise."""
    count = len(glyphs_N28)

    def uniform(low, high):
        return low + (high - low) * torch.rand(count, generator=random)

    angle, shear, scale = uniform(-0.35, 0.35), uniform(-0.3, 0.3), uniform(0.8, 1.25)  # angle: to 20 degrees
    shift_x, shift_y = uniform(-0.2, 0.2), uniform(-0.2, 0.2)  # in halves of the image: up to 3 pixels
    cos, sin = angle.cos() * scale, angle.sin() * scale
    affine_N6 = torch.stack([cos, shear * cos - sin, shift_x, sin, shear * sin + cos, shift_y], dim=1)
    grid = F.affine_grid(affine_N6.view(count, 2, 3), (count, 1, 28, 28), align_corners=False)
    images = F.grid_sample(glyphs_N28.unsqueeze(1), grid, align_corners=False).squeeze(1)
    ink = uniform(0.6, 1.3).view(count, 1, 1)  # strokes from light to dark
    noise = torch.randn(images.shape, generator=random) * 0.12
    return (images.mul_(ink).add_(noise).clamp_(0, 1) * 255).to(torch.uint8)
