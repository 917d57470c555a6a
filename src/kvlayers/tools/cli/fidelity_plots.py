"""The plots of a report of `kvlayers fidelity` on a text. They need matplotlib."""

from collections.abc import Callable, Sequence

from kvlayers.tools.measuring.fidelity import FULL, SettingFidelity
from kvlayers.tools.measuring.positions import FidelityRange
from kvlayers.tools.reporting.page import ReportPlot
from kvlayers.tools.reporting.plots import curves, labelled_points


def fidelity_plots(measured: Sequence[SettingFidelity]) -> list[ReportPlot]:
    """KL divergence against bytes, by position, and since packing. A plot without lines is left out."""
    title = "KL divergence against bytes"
    points = {each.name: (each.bytes_per_token, each.kl) for each in measured if each.bytes_per_token is not None}
    against_bytes = labelled_points("kl", title, "bytes a token", "mean KL divergence, nats", points)
    return [
        ReportPlot(title, against_bytes),
        *_curves("position", "Fidelity by position", "position in the passage, tokens", measured, _by_position),
        *_curves(
            "packing",
            "Fidelity since the last packing or eviction",
            "tokens since the last packing or eviction",
            measured,
            _since_packing,
        ),
    ]


def _by_position(measured: SettingFidelity) -> Sequence[FidelityRange]:
    return measured.by_position


def _since_packing(measured: SettingFidelity) -> Sequence[FidelityRange]:
    return measured.since_packing


def _curves(
    name: str,
    title: str,
    x_label: str,
    measured: Sequence[SettingFidelity],
    ranges_of: Callable[[SettingFidelity], Sequence[FidelityRange]],
) -> list[ReportPlot]:
    lines = {each.name: ranges_of(each) for each in measured if each.name != FULL and ranges_of(each)}
    if not lines:
        return []
    kl, agreement = (
        {line: {_middle(each): figure(each) for each in ranges} for line, ranges in lines.items()}
        for figure in (_kl, _agreement)
    )
    return [ReportPlot(title, curves(name, title, x_label, ("KL, nats", kl), ("same top-1", agreement)))]


def _middle(of: FidelityRange) -> float:
    return (of.start + of.stop - 1) / 2


def _kl(of: FidelityRange) -> float:
    return of.kl


def _agreement(of: FidelityRange) -> float:
    return of.agreement
