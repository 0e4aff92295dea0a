"""Which decoder serves a video, the engine that runs plans for one thread, and the schedule that keeps all engines busy."""

from gpupipe.data.decode.choice import Choice, Decoder, Mode, choose
from gpupipe.data.decode.engine import DecodeEngine, Fallbacks
from gpupipe.data.decode.helping import Helping
from gpupipe.data.decode.nvdec import Unsupported
from gpupipe.data.decode.process import DecodeProcess
from gpupipe.data.decode.schedule import Schedule

__all__ = [
    "Choice",
    "DecodeEngine",
    "DecodeProcess",
    "Decoder",
    "Fallbacks",
    "Helping",
    "Mode",
    "Schedule",
    "Unsupported",
    "choose",
]
