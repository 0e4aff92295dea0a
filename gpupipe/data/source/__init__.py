"""What there is to read: files, folders, globs and tables become one list of entries."""

from gpupipe.data.source.collect import Videos, class_names, collect, label_names, number_labels
from gpupipe.data.source.columns import column_kinds, start_frame

__all__ = [
    "Videos",
    "class_names",
    "collect",
    "column_kinds",
    "label_names",
    "number_labels",
    "start_frame",
]
