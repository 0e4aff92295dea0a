"""Which decoder serves a video, and the engine that runs plans for one thread."""

from gpupipe.data.decode.choice import Choice, choose
from gpupipe.data.decode.engine import DecodeEngine, Fallbacks

__all__ = ["Choice", "DecodeEngine", "Fallbacks", "choose"]
