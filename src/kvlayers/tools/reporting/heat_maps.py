"""Heat maps over lengths and depths, side by side. They need matplotlib."""

from collections.abc import Mapping
from typing import Any

from kvlayers.tools.reporting.plots import INK, figure_svg

Cells = Mapping[tuple[int, float], float]
"""The cells of a heat map: a figure by length in tokens and depth from 0 to 1."""

COLUMNS = 3
"""Heat maps side by side: with more of them, the figures in the cells of a page of 60 rem are too small to read."""

MOST_LETTERS = 34
"""Letters of a title that fit above a heat map."""

COLORS = "cividis"
"""A colour map that people with any form of colour blindness can read, from dark (low) to light (high)."""


def heat_maps(name: str, title: str, maps: Mapping[str, Cells], scale: tuple[float, float]) -> str:
    """Heat maps on one colour scale: lengths from left to right, depths from top to bottom, a figure in each cell.

    Args:
        name: letters that no other plot of the page has as its name.
        title: title of the plot.
        maps: the heat maps by their titles. A cell that is missing stays empty.
        scale: the figures of the darkest and of the lightest colour.
    """
    lengths = sorted({length for cells in maps.values() for length, _ in cells})
    depths = sorted({depth for cells in maps.values() for _, depth in cells})
    columns = min(COLUMNS, len(maps))
    rows = -(-len(maps) // columns)

    def draw(figure: Any) -> None:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        panels = figure.subplots(
            rows, columns, squeeze=False, sharex=True, sharey=True, subplot_kw={"facecolor": "none"}
        )
        for axes in panels.flat[len(maps) :]:
            axes.remove()
        for index, (axes, (label, cells)) in enumerate(zip(panels.flat, maps.items(), strict=False)):
            _draw_map(axes, cells, lengths, depths, scale)
            # The end of a long name says more than its beginning: package.module:callable.
            axes.set_title(
                label if len(label) <= MOST_LETTERS else f"…{label[1 - MOST_LETTERS :]}", loc="left", fontsize=9
            )
            # The map below may be missing, so that no other map has the labels of this column.
            axes.tick_params(labelbottom=index + columns >= len(maps), length=0)
        figure.supxlabel("tokens", fontsize=9)
        figure.supylabel("depth of the answer", fontsize=9)

    return figure_svg(name, (8, 0.9 + rows * (0.5 + 0.32 * len(depths))), draw)


def _draw_map(axes: Any, cells: Cells, lengths: list[int], depths: list[float], scale: tuple[float, float]) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    normalize, colors = Normalize(*scale, clip=True), colormaps[COLORS]
    for row, depth in enumerate(depths):
        for column, length in enumerate(lengths):
            figure = cells.get((length, depth))
            color = "none" if figure is None else colors(normalize(figure))
            # Not an image, which would be a bitmap in the SVG.
            corner = (column - 0.5, row - 0.5)
            axes.add_patch(Rectangle(corner, 1, 1, facecolor=color, edgecolor=INK, linewidth=0.3))
            if figure is not None:
                ink = "white" if normalize(figure) < 0.55 else "black"
                text = f"{figure:.2f}"
                axes.text(column, row, text, color=ink, ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=8)
    axes.set_xlim(-0.5, len(lengths) - 0.5)
    axes.set_ylim(len(depths) - 0.5, -0.5)
    axes.spines[:].set_visible(False)
