/** Pictures for the tests. */
import { crc32, deflateSync } from "node:zlib";

import sharp from "sharp";

/** A picture of one colour; a JPEG's pixels are near it, not equal. */
export function plain(background: string, format: "png" | "jpeg" | "webp" = "png", side = 8): Promise<Buffer> {
  return sharp({ create: { width: side, height: side, channels: 3, background } })[format]().toBuffer();
}

/** A PNG of the given pixels, 1 row. */
export function row(pixels: readonly (readonly number[])[]): Promise<Buffer> {
  const raw = { width: pixels.length, height: 1, channels: pixels[0]!.length as 1 | 3 | 4 };
  return sharp(Buffer.from(pixels.flat()), { raw }).png().toBuffer();
}

/** A PNG whose header promises so many pixels and which has next to none. */
export function promising(width: number, height: number): Buffer {
  const header = Buffer.alloc(13);
  header.writeUInt32BE(width, 0);
  header.writeUInt32BE(height, 4);
  header.set([8, 2, 0, 0, 0], 8); // 8 bits of red, green and blue
  const signature = Buffer.from("\x89PNG\r\n\x1a\n", "latin1");
  return Buffer.concat([signature, chunk("IHDR", header), chunk("IDAT", deflateSync(Buffer.alloc(64)))]);
}

function chunk(name: string, data: Buffer): Buffer {
  const body = Buffer.concat([Buffer.from(name, "latin1"), data]);
  const framed = Buffer.alloc(body.length + 8);
  framed.writeUInt32BE(data.length, 0);
  body.copy(framed, 4);
  framed.writeUInt32BE(crc32(body), body.length + 4);
  return framed;
}
