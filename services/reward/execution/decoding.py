"""Encoded media to samples, with limits that are checked in the header, before any pixel is decoded."""

from collections.abc import Collection
from dataclasses import dataclass

from flowfleet.media.files import PICTURE_TYPES, VIDEO_TYPES, MediaError, MediaLimits, OpenedMedia, open_media
from flowfleet.media.sound import SOUND_RATE, SOUND_TYPES, OpenedSound, decode_sound
from flowfleet.media.text import TEXT_TYPE, OpenedText, open_text
from flowfleet.proto.reward_pb2 import MODALITY_IMAGE, MODALITY_SOUND, MODALITY_TEXT, MODALITY_VIDEO, Modality
from flowfleet.rewards.requests import EncodedSample
from services.reward.scorer import NO_FRAMES, NO_SOUND, Problem, Sample

LIMITS = MediaLimits()
MAX_PIXELS = LIMITS.max_pixels
MAX_SIDE = LIMITS.max_side


@dataclass(frozen=True)
class Opened:
    """A picture or video of which only the header has been read, a text, or a sound."""

    media: OpenedMedia | OpenedText | OpenedSound
    sample: EncodedSample
    sound_rate: int = 0
    """Samples per second at which its sound is heard; 0: it is not."""

    @property
    def num_pixels(self) -> int:
        """Pixels of all frames."""
        return self.media.num_pixels


def open_sample(
    sample: EncodedSample, modalities: Collection[Modality.ValueType], sound_rate: int = SOUND_RATE
) -> Opened | Problem:
    """Reads the header of a sample's media; a Problem for a media type, a content or a size that is refused."""
    types = media_types(modalities)
    if sample.media_type not in types:
        return Problem("media_type", f"media_type {sample.media_type!r} is not read here: send {', '.join(types)}")
    try:
        if sample.media_type == TEXT_TYPE:
            return Opened(open_text(sample.media), sample)
        rate = sound_rate if MODALITY_SOUND in modalities else 0
        is_seen = sample.media_type in media_types(set(modalities) - {MODALITY_SOUND})
        if not is_seen:
            return Opened(OpenedSound(sample.media, sample.media_type), sample, rate)
        return Opened(open_media(sample.media, sample.media_type, LIMITS), sample, rate)
    except MediaError as error:
        return Problem(error.reason, str(error))


def decode(opened: Opened) -> Sample | Problem:
    """Decodes the text, the pixels or the sound. Alpha is dropped; of an animated picture the first frame counts."""
    media, sample, text = opened.media, opened.sample, ""
    try:
        frames = media.decode() if isinstance(media, OpenedMedia) else NO_FRAMES
        if isinstance(media, OpenedText):
            text = media.text
        hears = opened.sound_rate and sample.media_type in (*SOUND_TYPES, *VIDEO_TYPES)
        sound = decode_sound(media.data, media.media_type, rate=opened.sound_rate) if hears else NO_SOUND
    except MediaError as error:
        return Problem(error.reason, str(error))
    size = len(sample.media)
    return Sample(frames, sample.prompt, dict(sample.metadata), sample.group_id, sample.sample_id, size, text, sound)


def media_types(modalities: Collection[Modality.ValueType]) -> tuple[str, ...]:
    """Returns the media types that a scorer of these modalities is sent."""
    pictures = tuple(PICTURE_TYPES) if MODALITY_IMAGE in modalities else ()
    videos = VIDEO_TYPES if {MODALITY_VIDEO, MODALITY_SOUND} & set(modalities) else ()
    sounds = tuple(SOUND_TYPES) if MODALITY_SOUND in modalities else ()
    return pictures + videos + sounds + ((TEXT_TYPE,) if MODALITY_TEXT in modalities else ())
