"""What makes the clips of each shape: which frames they take, and their transform."""

from __future__ import annotations

from gpupipe.config import ClipConfig, LoaderConfig
from gpupipe.data.transform import ClipTransform

_Shape = tuple[int, int, int]


class Makers:
    """Clip transforms of one configuration, made when a shape first comes up; for use by several threads."""

    def __init__(self, config: LoaderConfig) -> None:
        self._config = config
        self._made: dict[_Shape, ClipTransform] = {}
        self.plain = ClipTransform(config.transform, config.clip.frames)
        """For clips of the configuration's own shape."""

    def transform(self, shape: _Shape | None) -> ClipTransform:
        """For clips of a shape; None: of the configuration's own."""
        if shape is None or (shape[0], shape[1:]) == (self._config.clip.frames, self._config.transform.size):
            return self.plain
        made = self._made.get(shape)
        if made is None:
            settings = self._config.transform.model_copy(update={"size": shape[1:]})
            made = self._made.setdefault(shape, ClipTransform(settings, shape[0]))
        return made

    def clip(self, shape: _Shape | None) -> ClipConfig:
        """Which frames such clips take."""
        clip = self._config.clip
        return clip if shape is None or shape[0] == clip.frames else clip.model_copy(update={"frames": shape[0]})
