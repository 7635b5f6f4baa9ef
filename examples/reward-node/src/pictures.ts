/** Encoded pictures to pixels. Only the header is read before the size is known to be within the limits. */
import sharp, { type Metadata, type Sharp } from "sharp";

import { PictureError } from "./errors.ts";

export const MAX_PIXELS = 4096 * 4096;
export const MAX_SIDE = 16_384;

/** Media types that are read, and the decoder's name of each: a file must be what its sample says. */
const FORMATS = new Map([
  ["image/png", "png"],
  ["image/jpeg", "jpeg"],
]);

// Pictures come from strangers: no other decoder can be reached, whatever the bytes look like.
sharp.block({ operation: ["VipsForeignLoad"] });
sharp.unblock({ operation: ["VipsForeignLoadPngBuffer", "VipsForeignLoadJpegBuffer"] });
sharp.cache(false);
sharp.concurrency(1); // pictures are decoded side by side, each on one thread

export interface Pixels {
  /** Red, green and blue of one pixel after the other, sRGB, 0 to 255. */
  data: Buffer;
  width: number;
  height: number;
}

/** The pixels of a PNG or JPEG, off the event loop; alpha is dropped. Throws PictureError for what is refused. */
export async function decode(media: Buffer, mediaType: string): Promise<Pixels> {
  const format = FORMATS.get(mediaType);
  if (format === undefined) {
    const known = [...FORMATS.keys()].join(", ");
    throw new PictureError(`media_type ${JSON.stringify(mediaType)} is not read here: send ${known}`);
  }
  const picture = await open(media, format);
  try {
    const { data, info } = await picture.removeAlpha().toColourspace("srgb").raw().toBuffer({ resolveWithObject: true });
    return { data, width: info.width, height: info.height };
  } catch (error) {
    throw undecodable(media, mediaType, error);
  }
}

/** Reads the header and refuses another format and a picture over the limits. */
async function open(media: Buffer, format: string): Promise<Sharp> {
  let picture: Sharp;
  let header: Metadata;
  try {
    picture = sharp(media, { limitInputPixels: false, failOn: "truncated" }); // the limits are ours, below
    header = await picture.metadata();
  } catch (error) {
    throw undecodable(media, `image/${format}`, error);
  }
  const { width, height } = header;
  if (header.format !== format) {
    throw new PictureError(`the media are image/${header.format}, not image/${format}: send the type that they are`);
  }
  if (width * height > MAX_PIXELS || Math.max(width, height) > MAX_SIDE) {
    const limits = `at most ${MAX_PIXELS} pixels and ${MAX_SIDE} a side are read`;
    throw new PictureError(`the picture is ${width} x ${height}: ${limits}; send a smaller one`);
  }
  return picture;
}

function undecodable(media: Buffer, mediaType: string, error: unknown): PictureError {
  const [reason] = String(error instanceof Error ? error.message : error).split("\n");
  return new PictureError(`the ${media.length} bytes of media are not a whole ${mediaType}: ${reason}`);
}
