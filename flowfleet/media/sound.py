"""Sounds of prompts as one channel of 16,000 samples a second. Files may come from strangers."""

import io
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flowfleet.limits import MAX_MEDIA_BYTES
from flowfleet.media.files import MediaError

SOUND_RATE: Final = 16_000
"""Samples per second after decoding."""
MAX_SECONDS: Final = 600.0
SOUND_TYPES: Final[Mapping[str, str]] = {
    "audio/wav": "wav",
    "audio/mpeg": "mp3",
    "audio/flac": "flac",
    "audio/ogg": "ogg",
}
"""Media types that are read, and the demuxer of each: the content is never guessed."""
SOUND_CODECS: Final = frozenset({"mp3", "mp3float", "flac", "vorbis", "libvorbis", "opus", "libopus"})
"""Codecs that are decoded, besides PCM."""


def decode_sound(data: bytes, media_type: str, max_seconds: float = MAX_SECONDS) -> NDArray[np.float32]:
    """(samples,) from -1 to 1. Raises MediaError for another type, a broken file and one over the limits."""
    if media_type not in SOUND_TYPES:
        raise MediaError("media_type", f"media_type {media_type!r} is not read here: send {', '.join(SOUND_TYPES)}")
    if len(data) > MAX_MEDIA_BYTES:
        raise MediaError("too_large", f"the file has {len(data)} bytes: send at most {MAX_MEDIA_BYTES}")
    parts, count = [], 0
    try:
        for part in _parts(data, SOUND_TYPES[media_type]):
            parts.append(part)
            count += len(part)
            if count > max_seconds * SOUND_RATE:
                raise MediaError("too_large", f"the sound is longer than {max_seconds:g} s: send a shorter one")
    except (MediaError, ImportError):  # without PyAV no file is to blame
        raise
    except Exception as error:  # PyAV documents no closed set
        raise _broken(data, media_type, type(error).__name__) from error
    if not count:
        raise _broken(data, media_type, "there is no sound in it")
    return np.concatenate(parts)


def _parts(data: bytes, form: str) -> Iterator[NDArray[np.float32]]:
    import av  # takes a third of a second

    resampler = av.AudioResampler(format="fltp", rate=SOUND_RATE)
    with av.open(io.BytesIO(data), "r", format=form, metadata_errors="replace") as container:
        opened: Any = container
        if not opened.streams.audio:
            return
        stream = opened.streams.audio[0]
        if not (stream.codec_context.name.startswith("pcm_") or stream.codec_context.name in SOUND_CODECS):
            raise MediaError("undecodable", f"codec {stream.codec_context.name} of a sound is not read")
        for frame in itertools.chain(opened.decode(stream), [None]):  # None: what is left
            for part in resampler.resample(frame):
                yield part.to_ndarray().mean(axis=0, dtype=np.float32)  # of channels, which never exceeds the loudest


def _broken(data: bytes, media_type: str, why: str) -> MediaError:
    return MediaError("undecodable", f"the {len(data)} bytes of media are not a whole {media_type}: {why}")
