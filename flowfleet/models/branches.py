"""Both branches of classifier-free guidance in one forward, where two small ones would wait for their launches."""

from torch import Tensor

from flowfleet.models.embeds import PromptEmbeds, concat_embeds

LARGE = 2**19
"""Numbers of latents, condition images among them, from which a branch fills an accelerator by itself: 8 pictures of
512² of Qwen-Image or SD3.5."""


def go_together(latents: Tensor, prompts: PromptEmbeds) -> bool:
    """Returns True if one forward of both branches is faster than two: on accelerators, below `LARGE`."""
    size = latents.numel() + sum(extra.numel() for extra in prompts.extras.values())
    return latents.device.type != "cpu" and size < LARGE


def stacked(prompts: PromptEmbeds, negative: PromptEmbeds, *, widths_may_differ: bool) -> PromptEmbeds | None:
    """The rows of `prompts`, then as many of `negative`; None where padding would have to be masked.

    Where widths may differ, the narrower half is padded and `PromptEmbeds.half_widths` says how wide each half is: the
    model cuts the padding off before its attention, which then needs no mask.
    """
    widths = prompts.embeds.shape[1], negative.embeds.shape[1]
    is_even = widths[0] == widths[1]
    if prompts.has_padding or negative.has_padding or not (is_even or widths_may_differ):
        return None
    both = concat_embeds([prompts, negative])
    if is_even:
        return both
    return PromptEmbeds(both.embeds, both.mask, both.extras, has_padding=False, half_widths=widths)
