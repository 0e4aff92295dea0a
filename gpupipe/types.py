"""What travels through the pipeline. Each object states its invariants and prints its shape, never its data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch

    from gpupipe.data.transform.mix import MixParams
    from gpupipe.data.transform.params import TransformParams

Rotation = Literal[0, 90, 180, 270]


@dataclass(frozen=True, slots=True)
class VideoInfo:
    """Facts of one video stream, from its container and its headers. ``None`` means that the stream does not say."""

    path: str
    container: str
    codec: str
    """FFmpeg's name: ``h264``, ``hevc``, ``vp9`` …"""
    pix_fmt: str
    """FFmpeg's name of the decoded samples' format: ``yuv420p``, ``yuv420p10le`` …"""
    width: int
    """Stored luma samples in a row, before display rotation."""
    height: int
    """Stored luma rows, before display rotation."""
    frames: int
    """Frames that the index can deliver, in display order 0 … frames - 1."""
    time_base: Fraction
    """Seconds a tick of pts."""
    fps: float
    """Average frames per second."""
    start_seconds: float
    """Time of the first frame; not always 0."""
    duration_seconds: float
    """From the first frame to the end of the last."""
    rotation: Rotation = 0
    """Degrees clockwise by which a stored frame is turned for display."""
    bit_depth: int = 8
    color_matrix: Literal["bt601", "bt709", "bt2020", "rgb"] | None = None
    """``rgb``: the planes are G, B and R."""
    color_range: Literal["limited", "full"] | None = None
    transfer: str | None = None
    """FFmpeg's name of the transfer characteristics: ``bt709``, ``smpte2084`` (PQ), ``arib-std-b67`` (HLG) …"""
    coded_size: tuple[int, int] | None = None
    """(height, width) of the pictures as they are coded, before the stream's own cropping."""
    chroma_location: Literal["left", "center", "topleft"] = "left"
    """Where a 4:2:0 chroma sample lies among its luma samples; MPEG's ``left`` where the stream does not say."""
    pixel_aspect: Fraction = Fraction(1)
    interlaced: bool = False
    uniform: bool = True
    """One size and one format from end to end, as far as the headers of the keyframes tell."""
    variable_rate: bool = False
    whole_start: bool = True
    """False when its first frames refer to pictures before its first one: decoders conceal that each in its own way."""
    damage: str | None = None
    """What is wrong with a file that is cut or has damaged packets; None for a whole one."""

    @property
    def display_size(self) -> tuple[int, int]:
        """(height, width) after rotation, without stretching by the pixel aspect."""
        return (self.width, self.height) if self.rotation in (90, 270) else (self.height, self.width)


@dataclass(frozen=True, slots=True)
class PlaneFormat:
    """How one decoded frame lies in memory: luma rows, then chroma rows, all with one pitch.

    With ``interleaved`` chroma (NV12, P016) the chroma rows hold U V U V …; without, all U rows come before all V rows.
    """

    width: int
    height: int
    chroma_width: int
    chroma_height: int
    bits: int = 8
    """Significant bits of a sample, 8 to 16."""
    shift: int = 0
    """Bits by which a sample is shifted up in its word: 16 - bits for P016, 0 for right-aligned samples."""
    interleaved: bool = False

    @property
    def sample_bytes(self) -> int:
        return 1 if self.bits == 8 else 2

    @property
    def rows(self) -> int:
        """Rows of one frame, luma and chroma."""
        return self.height + self.chroma_height * (1 if self.interleaved else 2)

    @property
    def row_samples(self) -> int:
        """Samples that the widest row needs; the pitch may be larger."""
        return max(self.width, self.chroma_width * (2 if self.interleaved else 1))

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """(rows, samples) of the parts of a frame whose rows are equally wide: luma above chroma, or both as one."""
        chroma_row = self.chroma_width * (2 if self.interleaved else 1)
        if chroma_row == self.width:
            return ((self.rows, self.width),)
        return ((self.height, self.width), (self.rows - self.height, chroma_row))

    @property
    def used_bytes(self) -> int:
        """Bytes of one frame's samples, without padding."""
        return self.sample_bytes * sum(rows * samples for rows, samples in self.parts)


@dataclass(frozen=True)
class Planes:
    """Decoded frames of one video as the codec made them.

    Attributes:
        data: (N, rows, pitch) uint8 or uint16, one frame after the other, laid out as ``format`` says.
        format: the layout of each frame.
    """

    data: torch.Tensor
    format: PlaneFormat

    def __post_init__(self) -> None:
        assert self.data.ndim == 3, self.data.shape
        assert self.data.shape[1] == self.format.rows, (self.data.shape, self.format)
        assert self.data.shape[2] >= self.format.row_samples, (self.data.shape, self.format)

    def __len__(self) -> int:
        return int(self.data.shape[0])

    @property
    def y(self) -> torch.Tensor:
        """(N, height, width), a view."""
        return self.data[:, : self.format.height, : self.format.width]

    @property
    def u(self) -> torch.Tensor:
        """(N, chroma_height, chroma_width), a view."""
        return self._chroma(0)

    @property
    def v(self) -> torch.Tensor:
        """(N, chroma_height, chroma_width), a view."""
        return self._chroma(1)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """(N, rows, samples) views without padding, as ``format.parts`` cuts each frame."""
        views, row = [], 0
        for rows, samples in self.format.parts:
            views.append(self.data[:, row : row + rows, :samples])
            row += rows
        return tuple(views)

    def fill(self, parts: Iterable[torch.Tensor], *, non_blocking: bool = False) -> None:
        """Copies such parts in."""
        for ours, theirs in zip(self.parts, parts, strict=True):
            copy_samples(ours, theirs, non_blocking=non_blocking)

    def _chroma(self, which: int) -> torch.Tensor:
        f = self.format
        if f.interleaved:
            return self.data[:, f.height : f.height + f.chroma_height, which : 2 * f.chroma_width : 2]
        first = f.height + which * f.chroma_height
        return self.data[:, first : first + f.chroma_height, : f.chroma_width]

    def __repr__(self) -> str:
        return f"Planes({tuple(self.data.shape)} {self.data.dtype} on {self.data.device}, {self.format})"


def copy_samples(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copies samples between any two places.

    On the CPU by this thread alone: torch would share the work with threads that wait for cores on which others decode.
    """
    if target.device.type == source.device.type == "cpu":
        target.numpy()[...] = source.numpy()
    else:
        target.copy_(source, non_blocking=non_blocking)


class Named(Protocol):
    """What has a name that a video may be opened by, for as long as it lives."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """One video of the source with the columns of its row."""

    path: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    where: str = field(default="", compare=False)
    """The table and line that it comes from; empty without a table."""
    part: int = field(default=0, compare=False)
    """Which item of the list of videos it comes from, from 0."""
    held: Named | None = field(default=None, compare=False, repr=False)
    """What keeps its bytes, where the program has them itself, and names them; ``path`` is then what people call the video.
    See ``gpupipe.data.bytes.held.hold``."""

    @property
    def named(self) -> str:
        """The video, and its line in a table, as errors name it."""
        return f"{self.path} ({self.where})" if self.where else self.path


@dataclass(frozen=True, slots=True)
class ClipRequest:
    """One visit to a video, for one clip or several: (seed, epoch, sample, attempt) fix the video and every random choice."""

    seed: int
    epoch: int
    sample: int
    """Number of the sample in the epoch's global order, the same whatever the number of ranks."""
    entry: int
    """Position of the video in the source."""
    attempt: int = 0
    """0 for the sample itself, n for its n-th substitute."""
    shape: tuple[int, int, int] | None = None
    """(frames, height, width) of its clips, where a loader's clips have several shapes."""


@dataclass(frozen=True, slots=True)
class FramePick:
    """Which frames of a video make a clip.

    Attributes:
        indices: T display positions, repeats and any order allowed.
        mask: T flags, False where padding stands in for a frame that the video does not have.
        blend: T shares, 0 to 1, that the following frame of the video has in each; none where nothing is blended.
    """

    indices: tuple[int, ...]
    mask: tuple[bool, ...]
    blend: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.indices) == len(self.mask) > 0
        assert len(self.blend) in (0, len(self.indices))

    @property
    def decoded(self) -> tuple[int, ...]:
        """All positions to decode: ``indices``, and where frames are blended the following ones behind them (2 T)."""
        if not self.blend:
            return self.indices
        return self.indices + tuple(k + (share > 0) for k, share in zip(self.indices, self.blend, strict=True))


@dataclass(frozen=True, slots=True)
class ClipRecord:
    """How one clip of a batch came about: enough to make it again, by :meth:`gpupipe.VideoLoader.replay`."""

    path: str
    request: ClipRequest
    pick: FramePick
    params: TransformParams
    decoder: str
    """``nvdec``, ``dali`` or ``cpu``."""
    clip: int = 0
    """Number of the clip among those of its request."""


@dataclass(slots=True)
class Clip:
    """What a user's own transform is given: one clip on its way into a batch.

    Attributes:
        video: its frames; before gpupipe's transform (T, 3, H, W) uint8 RGB as displayed, after it the clip as the batch will
            have it. On the loader's device; on CUDA on the stream that is current in the call.
        info: facts of the video.
        pick: which frames of it these are.
        rng: for random choices that a run repeats: keyed by (seed, epoch, sample, clip), for each of the two places apart.
        params: what gpupipe's transform drew; None before it.
    """

    video: torch.Tensor
    info: VideoInfo
    pick: FramePick
    rng: np.random.Generator
    params: TransformParams | None = None


BATCH_TENSORS = ("video", "tokens", "cu_seqlens", "grid", "pts_seconds", "mask")
"""Names of a batch's own tensors, which no column may have."""
_RAGGED = ("tokens", "cu_seqlens")
"""Those of packed clips, without a row for each clip."""


class Batch(Mapping[str, "torch.Tensor"]):
    """A mapping of tensors with one leading dimension B, so that ``model(**batch)`` and trainers can walk it.

    Keys: ``video`` (B, C, T, H, W) or (B, T, C, H, W) as configured; ``pts_seconds`` (B, T) float64, the times of the frames;
    ``mask`` (B, T) bool, False for padding; ``label`` (B,) where the source has one, or (B, classes) float32 where
    ``mix`` is asked for; further columns of numbers as asked for, (B,) int64 or float64, and of arrays, (B, …) int64, float32
    or float64; and what ``tokenize`` makes of text. With ``batch.layout="pack"`` in the place of ``video``: ``tokens``
    (N, 3 * pt * ph * pw), all patches of all clips, clip b from ``cu_seqlens[b]`` on, (B + 1,) int32; and ``grid`` (B, 3)
    int32, its tokens along time, height and width.

    Attributes:
        clips: one :class:`ClipRecord` a clip; none in a batch made of tensors alone, as trainers do with
            ``type(batch)({key: tensor.to(device) …})``.
        text: columns that are text, as lists of B strings.
        epoch: the epoch that the batch belongs to, from 0.
        index: position of the batch in its epoch, from 0.
        mix: how the clips were mixed, where they are.
        substituted: paths that could not be used, one for each time that another sample stood in. ``clips[k].request.attempt``
            tells which slots have stand-ins: 0 is the sample itself.
        state: what ``state_dict()`` of the loader gives once this batch is the last one received: for trainers that ask for
            a batch before they have used the one before it. Empty in a batch that no loader made.
        lengths: tokens of each packed clip, on the host: ``max(batch.lengths)`` is what variable-length attention asks for.
        part: (number, of how many), where steps are handed out in parts (``batch.micro_size``).
        share: of the step's clips, that are in this part: times the mean loss of the part it adds up to that of the step.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        clips: tuple[ClipRecord, ...] = (),
        *,
        text: Mapping[str, list[str]] | None = None,
        epoch: int = 0,
        index: int = 0,
        mix: MixParams | None = None,
        substituted: tuple[str, ...] = (),
        state: Mapping[str, Any] | None = None,
        lengths: tuple[int, ...] = (),
        part: tuple[int, int] = (0, 1),
        share: float = 1.0,
    ) -> None:
        for name, tensor in tensors.items():
            if clips and name not in _RAGGED:
                assert tensor.shape[0] == len(clips), f"{name} has {tensor.shape[0]} rows for {len(clips)} clips"
        self._tensors = dict(tensors)
        self.clips = clips
        self.text = dict(text or {})
        self.epoch = epoch
        self.index = index
        self.mix = mix
        self.substituted = substituted
        self.state = dict(state or {})
        self.lengths = lengths
        self.part = part
        self.share = share

    @property
    def paths(self) -> list[str]:
        """The video of each clip."""
        return [clip.path for clip in self.clips]

    @property
    def params(self) -> list[TransformParams]:
        """What was drawn for each clip."""
        return [clip.params for clip in self.clips]

    @property
    def video(self) -> torch.Tensor:
        """``batch["video"]``: the clips, (B, C, T, H, W) or (B, T, C, H, W) as configured.

        Raises:
            KeyError: where they are packed, ``batch["tokens"]``; it says what there is.
        """
        return self["video"]

    @property
    def label(self) -> torch.Tensor:
        """``batch["label"]``: the class of each clip, (B,) int64; (B, classes) float32 where ``mix`` is asked for.

        Raises:
            AttributeError: where the source has none.
        """
        try:
            return self["label"]
        except KeyError as missing:
            raise AttributeError(missing.args[0]) from None

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Batch:
        """This batch with its tensors on another device and its attributes kept.

        Raises:
            TypeError: for a dtype: labels have one too.
        """
        if type(device).__name__ == "dtype":
            raise TypeError("Batch.to() takes a device; for another type convert one tensor: batch.video.to(dtype)")
        return self.like({name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self._tensors.items()})

    def like(self, tensors: Mapping[str, torch.Tensor], **changes: Any) -> Batch:
        """A batch of other tensors with this one's attributes, but for ``changes``, which are arguments of the constructor."""
        names = ("clips", "text", "epoch", "index", "mix", "substituted", "state", "lengths", "part", "share")
        return Batch(tensors, **{name: getattr(self, name) for name in names} | changes)

    def __getitem__(self, key: str) -> torch.Tensor:
        try:
            return self._tensors[key]
        except KeyError:
            raise KeyError(self._lacking(key)) from None

    if not TYPE_CHECKING:  # for which there are no other attributes

        def __getattr__(self, name: str) -> Any:
            """Says where what is no attribute is, as for a key that is not there."""
            if name.startswith("_"):  # asked for by Python itself, also before there is anything
                raise AttributeError(f"a Batch has no attribute {name!r}")
            there = f"{name!r} is no attribute: batch[{name!r}] has it" if name in self._tensors else self._lacking(name)
            raise AttributeError(there)

    def _lacking(self, key: str) -> str:
        where = f" (the text of {key!r} is in batch.text[{key!r}])" if key in self.text else ""
        if key == "label":
            where = " (labels come from a column 'label', or with source={'label_from': 'folder'} from the folders)"
        return f"{key!r}: this batch has {', '.join(self._tensors)}{where}"

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        parts = [f"{k}: {str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for k, t in self._tensors.items()]
        return f"Batch(epoch {self.epoch}, index {self.index}, {', '.join(parts)}, on {self.device or '?'})"

    @property
    def device(self) -> torch.device | None:
        """Where its tensors are; None for a batch without any."""
        return next((tensor.device for tensor in self._tensors.values()), None)
