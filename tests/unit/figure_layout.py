"""What a reader would call ugly: texts that overlap, leave the figure, or are covered."""

import itertools

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

TOLERANCE_PX = 1.0


def layout_faults(figure: Figure) -> list[str]:
    """Return one sentence per fault; [] for a clean figure."""
    FigureCanvasAgg(figure).draw()
    boxes = [(text.get_text(), text.get_window_extent()) for text in _texts(figure)]
    faults = [f"{name!r} leaves the figure" for name, box in boxes if not _is_inside(box, figure.bbox)]
    for (name, box), (other, other_box) in itertools.combinations(boxes, 2):
        if _overlap(box, other_box):
            faults.append(f"{name!r} overlaps {other!r}")
    for legend, axes in itertools.product(figure.legends, figure.axes):
        if _overlap(legend.get_window_extent(), axes.bbox):
            faults.append("the legend covers the plot")
    return faults


def _texts(figure: Figure) -> list[Text]:
    texts = [text for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if not axis.get_visible():
                continue
            texts += [axis.label, axis.get_offset_text()]
            first, last = sorted(axis.get_view_interval())
            places = zip(axis.get_major_ticks(), axis.get_majorticklocs(), strict=True)
            for tick, place in places:
                if first <= place <= last:
                    texts += [label for label in (tick.label1, tick.label2) if label.get_visible()]
    return [text for text in texts if text.get_visible() and text.get_text().strip()]


def _overlap(a: Bbox, b: Bbox) -> bool:
    width = min(a.x1, b.x1) - max(a.x0, b.x0)
    height = min(a.y1, b.y1) - max(a.y0, b.y0)
    return width > TOLERANCE_PX and height > TOLERANCE_PX


def _is_inside(box: Bbox, outer: Bbox) -> bool:
    return (
        box.x0 >= outer.x0 - TOLERANCE_PX
        and box.x1 <= outer.x1 + TOLERANCE_PX
        and box.y0 >= outer.y0 - TOLERANCE_PX
        and box.y1 <= outer.y1 + TOLERANCE_PX
    )
