"""Frames to and from files: a picture is a PNG, a video an H.264 MP4 whose sound is FLAC. For whoever makes, stores or
scores samples.

Files may come from strangers: `open_media` reads the header only and refuses what is over the `MediaLimits`, and
`decode` holds the file to what its header promised. A picture is a video of one frame everywhere. PyAV is imported with
the first video: it takes a third of a second, and most jobs are of pictures.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from flowfleet.limits import MAX_MEDIA_BYTES

if TYPE_CHECKING:
    from flowfleet.media.sound import Sound

Frames = NDArray[np.uint8]
"""(F, H, W, 3) RGB."""

PICTURE_TYPES: Final[Mapping[str, str]] = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP"}
"""Media types of pictures that are read, and PIL's name of each: the content is never guessed."""
VIDEO_TYPES: Final = ("video/mp4",)
"""Media types of videos that are read."""
VIDEO_CODECS: Final = frozenset({"h264", "hevc", "vp9", "av1", "libdav1d", "mpeg4"})
"""Codecs that are decoded inside an MP4."""

PNG_COMPRESSION: Final = 1
"""zlib's fastest level: five times quicker than the default, pictures a tenth larger."""
_X264: Final = {"crf": "12", "preset": "veryfast", "mbtree": "0", "chroma_sample_location": "center"}
"""No eye tells quality 12 from the frames themselves. Its tree of macroblocks is off: for narrow videos it reads
uninitialized memory and makes different bytes each time. The scaler puts chroma in the center of its pixels."""
_BT709: Final = 1
_LIMITED_RANGE: Final = 1


class MediaError(ValueError):
    """A file that is refused; `reason` is "media_type", "too_large" or "undecodable"."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of a media file."""

    max_bytes: int = MAX_MEDIA_BYTES
    """Maximum size of the file."""
    max_pixels: int = 4096 * 4096
    """Maximum pixels of one frame."""
    max_side: int = 16_384
    """Maximum height and width of a frame."""
    max_frames: int = 1025
    """Maximum number of frames: one more than a multiple of 4, as video models need it."""
    max_total_pixels: int = 2**27
    """Maximum pixels of all frames together; 3 bytes each once decoded."""

    def excess(self, width: int, height: int, num_frames: int) -> str:
        """In what such frames are over the limits: what they are and what is allowed; or nothing."""
        if width * height > self.max_pixels or max(width, height) > self.max_side:
            return f"{width} x {height}: at most {self.max_pixels} pixels and {self.max_side} a side are read"
        if num_frames > self.max_frames or width * height * num_frames > self.max_total_pixels:
            allowed = f"at most {self.max_frames} frames and {self.max_total_pixels} pixels together are read"
            return f"{num_frames} frames of {width} x {height}: {allowed}"
        return ""


@dataclass(frozen=True)
class OpenedMedia:
    """A file of which only the header has been read."""

    data: bytes
    media_type: str
    width: int
    height: int
    num_frames: int
    picture: Image.Image | None = None
    rate: float = 0.0
    """Frames of a video per second; 0: not known."""

    @property
    def num_pixels(self) -> int:
        """Pixels of all frames."""
        return self.width * self.height * self.num_frames

    def frames(self) -> Iterator[Frames]:
        """(H, W, 3) each, in the order of showing, one in memory at a time. Raises MediaError."""
        with _reading(self.data, self.media_type):
            if self.picture is not None:
                yield self.decode()[0]
                return
            count = 0
            for picture in _pictures(self):
                if count == self.num_frames or picture.shape != (self.height, self.width, 3):
                    raise _undecodable(self.data, self.media_type, "its frames are not those of its header")
                yield picture
                count += 1
            if count < self.num_frames:
                raise _undecodable(self.data, self.media_type, f"{count} of {self.num_frames} frames could be decoded")

    def decode(self) -> Frames:
        """Decodes all frames. A picture is turned as its EXIF data say, and its alpha is dropped; of an animated
        picture the first frame counts. Raises MediaError."""
        with _reading(self.data, self.media_type):
            if self.picture is None:
                frames = np.empty((self.num_frames, self.height, self.width, 3), np.uint8)
                for index, picture in enumerate(self.frames()):
                    frames[index] = picture
                return frames
            return np.asarray(as_rgb(ImageOps.exif_transpose(self.picture)))[None]


def as_rgb(picture: Image.Image) -> Image.Image:
    """The picture in RGB of 8 bits. PIL cuts gray of 16 bits off at 255; here its upper 8 bits count, as PIL takes them
    of colors."""
    if picture.mode.startswith("I"):
        picture = Image.fromarray((np.asarray(picture).clip(0, 65_535) >> 8).astype(np.uint8))
    return picture.convert("RGB")


def encode_media(frames: Frames, fps: float = 16.0, sound: Sound | None = None) -> tuple[bytes, str]:
    """A file and its media type: one frame becomes a PNG, more an MP4 that plays while it loads. Equal frames make
    equal bytes.

    Args:
        frames: (F, H, W, 3) uint8; of more than one frame height and width must be even.
        fps: frames a second of a video.
        sound: of a video; kept at 16 bits without loss, so that rewards hear what was made.

    Raises ValueError for frames of another kind or size.
    """
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not frames.size:
        raise ValueError(f"frames must be (F, H, W, 3) uint8, but they are {frames.shape} {frames.dtype}")
    if len(frames) == 1:
        return _encode_picture(frames[0]), "image/png"
    height, width = frames.shape[1:3]
    if height % 2 or width % 2:
        raise ValueError(f"height and width of a video must be even, but they are {height} and {width}")
    if not 0 < fps <= 1000:
        raise ValueError(f"fps must be above 0 and at most 1000, but it is {fps}")
    return _encode_video(frames, Fraction(fps).limit_denominator(1001), sound), "video/mp4"


def decode_media(data: bytes, media_type: str, limits: MediaLimits | None = None) -> Frames:
    """The frames of a picture or a video. Raises MediaError, as `open_media`."""
    return open_media(data, media_type, limits).decode()


def open_media(data: bytes, media_type: str, limits: MediaLimits | None = None) -> OpenedMedia:
    """Reads the header of a file of one of `PICTURE_TYPES` or `VIDEO_TYPES`.

    Raises MediaError for another media type, a content that is not of it, and what is over the limits.
    """
    limits = limits or MediaLimits()
    is_picture = media_type in PICTURE_TYPES
    if not is_picture and media_type not in VIDEO_TYPES:
        known = ", ".join((*PICTURE_TYPES, *VIDEO_TYPES))
        raise MediaError("media_type", f"media_type {media_type!r} is not read here: send {known}")
    if len(data) > limits.max_bytes:
        raise MediaError("too_large", f"the file has {len(data)} bytes: send at most {limits.max_bytes}")
    with _reading(data, media_type):
        opened = _open_picture(data, media_type) if is_picture else _open_video(data, media_type, limits)
    if excess := limits.excess(opened.width, opened.height, opened.num_frames):
        kind = "picture" if is_picture else "video"
        raise MediaError("too_large", f"the {kind} is {excess}; send a shorter or smaller one")
    return opened


@contextmanager
def _reading(data: bytes, media_type: str) -> Iterator[None]:
    """Turns whatever a broken file raises into a MediaError; PIL and PyAV document no closed set of that."""
    try:
        yield
    except (MediaError, ImportError):  # without PyAV no file is to blame
        raise
    except Image.DecompressionBombError as error:
        raise MediaError("too_large", f"{error}: send a smaller picture") from error
    except Exception as error:
        raise _undecodable(data, media_type, type(error).__name__) from error


def _undecodable(data: bytes, media_type: str, why: str) -> MediaError:
    return MediaError("undecodable", f"the {len(data)} bytes of media are not a whole {media_type}: {why}")


def _open_picture(data: bytes, media_type: str) -> OpenedMedia:
    picture = Image.open(io.BytesIO(data), formats=[PICTURE_TYPES[media_type]])
    return OpenedMedia(data, media_type, picture.width, picture.height, 1, picture)


def _open_video(data: bytes, media_type: str, limits: MediaLimits) -> OpenedMedia:
    # max_pixels keeps the decoder, which looks at the first frame, from making room for more
    with _container(data, max_pixels=str(limits.max_pixels)) as container:
        stream = _stream(container, data, media_type)
        width, height, declared = stream.width, stream.height, stream.frames
        rate = float(stream.average_rate or 0.0)
        packets = [(packet.is_discard, packet.is_corrupt) for packet in container.demux(stream) if packet.size]
    num_frames = sum(not discarded for discarded, _ in packets)
    if any(corrupt for _, corrupt in packets) or len(packets) < declared or not (num_frames and width and height):
        raise _undecodable(data, media_type, f"{num_frames} of {declared} frames are there")
    return OpenedMedia(data, media_type, width, height, num_frames, rate=rate)


def _pictures(opened: OpenedMedia) -> Iterator[Frames]:
    """(H, W, 3) each, in the order of showing."""
    scaler = _scaler()
    with _container(opened.data, max_pixels=str(opened.width * opened.height), err_detect="explode") as container:
        stream = _stream(container, opened.data, opened.media_type)
        stream.codec_context.thread_count = 1
        for frame in container.decode(stream):
            if frame.is_corrupt:
                raise _undecodable(opened.data, opened.media_type, "a frame is broken")
            yield frame.reformat(format="rgb24", interpolation=scaler).to_ndarray()


def _scaler() -> Any:
    """How colors are converted: without the rounding that by default darkens by a level or two, alike on every
    machine."""
    from av.video.reformatter import Interpolation as To

    return To.BICUBIC | To.FULL_CHR_H_INT | To.FULL_CHR_H_INP | To.ACCURATE_RND | To.BITEXACT


def _container(data: bytes, **options: str) -> Any:
    """Opens an MP4. The demuxer reads no other file: references to them are off by default."""
    import av

    return av.open(io.BytesIO(data), "r", format="mp4", options=options, metadata_errors="replace")


def _stream(container: Any, data: bytes, media_type: str) -> Any:
    if not container.streams.video:
        raise _undecodable(data, media_type, "there is no video in it")
    stream = container.streams.video[0]
    if stream.codec_context is None or stream.codec_context.name not in VIDEO_CODECS:
        raise _undecodable(data, media_type, f"its codec is none of {', '.join(sorted(VIDEO_CODECS))}")
    return stream


def _encode_picture(frame: Frames) -> bytes:
    out = io.BytesIO()
    Image.fromarray(frame).save(out, "PNG", compress_level=PNG_COMPRESSION)
    return out.getvalue()


def _encode_video(frames: Frames, fps: Fraction, sound: Sound | None) -> bytes:
    """Encodes on one thread: only so does x264 make equal bytes everywhere. Callers encode several videos at once."""
    import av

    out, scaler = io.BytesIO(), _scaler()
    options = {"movflags": "faststart"}
    with av.open(out, "w", format="mp4", options=options, io_open=lambda *_: _SecondReader(out)) as container:
        stream = container.add_stream("libx264", rate=fps, options=_X264)
        context = stream.codec_context
        context.height, context.width = frames.shape[1:3]
        context.pix_fmt, context.thread_count = "yuv420p", 1
        context.colorspace = context.color_primaries = context.color_trc = _BT709
        context.color_range = _LIMITED_RANGE
        track: Any = None
        if sound is not None:
            layout = "mono" if len(sound.samples) == 1 else "stereo"
            track = container.add_stream("flac", rate=sound.rate, layout=layout, options={"strict": "-2"})
            track.format = "s16"
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            picture = picture.reformat(
                format="yuv420p", dst_colorspace="ITU709", dst_color_range="MPEG", interpolation=scaler
            )
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
        if sound is not None:
            heard = av.AudioFrame.from_ndarray(sound.pcm().reshape(1, -1), format="s16", layout=track.layout)
            heard.rate, heard.pts, heard.time_base = sound.rate, 0, Fraction(1, sound.rate)
            container.mux([*track.encode(heard), *track.encode()])
    return out.getvalue()


class _SecondReader(io.RawIOBase):
    """A file on the same buffer with a place of its own: the muxer reads what it wrote, to put the index in front."""

    def __init__(self, buffer: io.BytesIO) -> None:
        self._buffer = buffer
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._buffer.getbuffer().nbytes}[whence]
        self._place = start + offset
        return self._place

    def read(self, size: int = -1) -> bytes:
        position = self._buffer.tell()
        self._buffer.seek(self._place)
        data = self._buffer.read(size)
        self._place += len(data)
        self._buffer.seek(position)
        return data
