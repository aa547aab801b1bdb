"""Images of digits that are drawn, not photographed: there is something to train on everywhere."""

from __future__ import annotations

import numpy as np

__all__ = ["draw_digits"]

SIZE = 12
"""Height and width of an image."""

# Seven rows of five pixels for each digit.
_FONT = """
.###.  ..#..  .###.  .###.  ...#.  #####  ..##.  #####  .###.  .###.
#...#  .##..  #...#  #...#  ..##.  #....  .#...  ....#  #...#  #...#
#..##  ..#..  ....#  ....#  .#.#.  ####.  #....  ...#.  #...#  #...#
#.#.#  ..#..  ...#.  ..##.  #..#.  ....#  ####.  ..#..  .###.  .####
##..#  ..#..  ..#..  ....#  #####  ....#  #...#  ..#..  #...#  ....#
#...#  ..#..  .#...  #...#  ...#.  #...#  #...#  ..#..  #...#  ...#.
.###.  .###.  #####  .###.  ...#.  .###.  .###.  ..#..  .###.  .##..
"""
_ROWS, _COLUMNS = 7, 5


def draw_digits(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draws digits as a hurried hand would: turned, slanted, stretched, moved, faint and noisy.

    The same seed draws the same images everywhere.

    Returns:
        Images, uint8 of shape (count, SIZE, SIZE), and what they show, int64 in 0..9.
    """
    draws = np.random.default_rng(seed)
    digits = draws.permutation(np.arange(count) % 10)
    angle, slant = draws.uniform(-0.35, 0.35, (2, count, 1, 1))
    height, width = draws.uniform(0.9, 1.45, (2, count, 1, 1))
    down, right = draws.uniform(-1.2, 1.2, (2, count, 1, 1))
    # Where in the glyph each pixel of an image looks.
    y, x = np.mgrid[:SIZE, :SIZE] - (SIZE - 1) / 2
    y, x = y[None] - down, x[None] - right
    y, x = np.cos(angle) * y - np.sin(angle) * x, np.sin(angle) * y + np.cos(angle) * x
    y, x = y / height + (_ROWS - 1) / 2, (x + slant * y) / width + (_COLUMNS - 1) / 2
    ink = _between_pixels(_glyphs()[digits], y, x)
    ink = ink * draws.uniform(0.5, 1.0, (count, 1, 1)) + draws.normal(0, 0.12, ink.shape)
    return np.rint(np.clip(ink, 0, 1) * 255).astype(np.uint8), digits


def _glyphs() -> np.ndarray:
    """Returns the font as an array of (10, rows, columns), 1 where there is ink."""
    lines = [line.split() for line in _FONT.split("\n") if line]
    return np.array([[[pixel == "#" for pixel in line[i]] for line in lines] for i in range(10)])


def _between_pixels(glyphs: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Reads glyph i at the places ``y[i]``, ``x[i]``, linearly between pixels; paper around it."""
    margin = SIZE
    padded = np.pad(glyphs.astype(np.float64), ((0, 0), (margin, margin), (margin, margin)))
    top, left = np.floor(y).astype(int), np.floor(x).astype(int)
    of_bottom, of_right = y - top, x - left
    which = np.arange(len(glyphs))[:, None, None]

    def at(row: np.ndarray, column: np.ndarray) -> np.ndarray:
        row = np.clip(row + margin, 0, padded.shape[1] - 1)
        read: np.ndarray = padded[which, row, np.clip(column + margin, 0, padded.shape[2] - 1)]
        return read

    upper = at(top, left) * (1 - of_right) + at(top, left + 1) * of_right
    lower = at(top + 1, left) * (1 - of_right) + at(top + 1, left + 1) * of_right
    mixed: np.ndarray = upper * (1 - of_bottom) + lower * of_bottom
    return mixed
