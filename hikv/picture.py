"""Pictures of one figure against another, drawn by matplotlib where that is installed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hikv.errors import ArgumentError


@dataclass(frozen=True)
class Series:
    """One line of a panel, or loose points; `spread` is the low and the high end of each point."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    line: bool = True
    spread: Sequence[tuple[float, float]] | None = None


def draw(
    title: str,
    panels: Mapping[str, Sequence[Series]],
    file: Path,
    x: str = "CTAs",
    y: str = "GB/s (10⁹ payload bytes)",
) -> None:
    """One panel a name, `x` on a logarithmic axis, from 0 on where a line starts there; the format
    follows the file's name."""
    plt = pyplot()
    figure, axes = plt.subplots(
        1, len(panels), figsize=(10, 4.5), sharey=True, squeeze=False, layout="constrained"
    )
    top = max((value for series in panels.values() for one in series for value in one.y), default=1)
    for axis, (name, series) in zip(axes[0], panels.items(), strict=True):
        for one in series:
            errors = None
            if one.spread is not None:
                pairs = zip(one.y, one.spread, strict=True)
                errors = list(zip(*((y - low, high - y) for y, (low, high) in pairs), strict=True))
            axis.errorbar(
                one.x,
                one.y,
                yerr=errors,
                label=one.label,
                linestyle="-" if one.line else "none",
                marker="" if one.line else "o",
                capsize=3,
            )
        if any(x <= 0 for one in series for x in one.x):
            axis.set_xscale("symlog", base=2, linthresh=1)
        else:
            axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set(title=name, xlabel=x, ylim=(0, 1.1 * top))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(y)
    if axes[0][0].get_legend_handles_labels()[0]:
        axes[0][0].legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(file, dpi=150)
    plt.close(figure)


def pyplot() -> Any:
    """`matplotlib.pyplot` for files; raises `ArgumentError` where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ArgumentError(
            "--plot", expected="matplotlib", got=error, remedy="pip install 'hikv[plot]'"
        ) from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # words as words, at a third of the size
    from matplotlib import pyplot as plt

    return plt


def check_picture(path: Path) -> None:
    """Refuse before the work a picture that could not be drawn after it; raises `ArgumentError`."""
    check_file("--plot", path)
    pyplot()
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ArgumentError(
            "--plot",
            expected=f"a name that ends in one of {', '.join(sorted(formats))}",
            got=path,
            remedy="name it .png or .svg",
        )


def check_file(option: str, path: Path) -> None:
    """Refuse before the work a file that could not be written after it; raises `ArgumentError`."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ArgumentError(
            option,
            expected="a file in a folder that exists",
            got=path,
            remedy=f"make {path.parent} first",
        )
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ArgumentError(
            option,
            expected="a file that can be written",
            got=path,
            remedy="name another file",
        )
