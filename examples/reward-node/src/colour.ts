/** The reward itself: how near the pixels of a picture are to a colour. Pure arithmetic. */
import { invalid } from "./errors.ts";
import type { Pixels } from "./pictures.ts";

export const NAME = "colour";
export const RANGE = [0, 1] as const;
export const COMPONENTS = ["red", "green", "blue", "brightness", "contrast"] as const;

/** Of brightness: Rec. 709's weights of red, green and blue. */
const LUMA = [0.2126, 0.7152, 0.0722] as const;

type Rgb = readonly [red: number, green: number, blue: number];

export interface Params {
  /** sRGB, 0 to 255. */
  target: Rgb;
}

export interface Score {
  score: number;
  components: Record<(typeof COMPONENTS)[number], number>;
}

/** The parameters of a request, defaults filled in. Throws INVALID_ARGUMENT for what is unknown or malformed. */
export function readParams(params: Record<string, string>): Params {
  for (const name of Object.keys(params)) {
    if (name !== "target") throw invalid(`params.${name} is unknown: this reward takes target`);
  }
  const text = params["target"] ?? "#ff0000";
  if (!/^#[0-9a-f]{6}$/i.test(text)) {
    throw invalid(`params.target = ${JSON.stringify(text)}: give a colour as in "#ff0000"`);
  }
  const [red, green, blue] = Buffer.from(text.slice(1), "hex") as Iterable<number>;
  return { target: [red!, green!, blue!] };
}

/**
 * 1 − the mean distance of the pixels to the target, over the greatest that any colour has to it.
 *
 * A picture all of the target scores 1, one all of the colour farthest from it 0. The distance is Euclid's, of sRGB's
 * own values. Components, all of 0 … 1: the mean of each channel, and mean and standard deviation of the brightness.
 */
export function score({ data, width, height }: Pixels, { target }: Params): Score {
  const farthest = Math.hypot(...target.map((value) => Math.max(value, 255 - value)));
  const sums = { distance: 0, red: 0, green: 0, blue: 0, luma: 0, squares: 0 };
  for (let at = 0; at < data.length; at += 3) {
    const red = data[at]!;
    const green = data[at + 1]!;
    const blue = data[at + 2]!;
    const luma = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue;
    sums.distance += Math.sqrt((red - target[0]) ** 2 + (green - target[1]) ** 2 + (blue - target[2]) ** 2);
    sums.red += red;
    sums.green += green;
    sums.blue += blue;
    sums.luma += luma;
    sums.squares += luma * luma;
  }
  const pixels = width * height;
  const brightness = sums.luma / pixels;
  return {
    score: within01(1 - sums.distance / pixels / farthest),
    components: {
      red: sums.red / pixels / 255,
      green: sums.green / pixels / 255,
      blue: sums.blue / pixels / 255,
      brightness: within01(brightness / 255),
      contrast: Math.sqrt(Math.max(0, sums.squares / pixels - brightness ** 2)) / 255,
    },
  };
}

/** Rounding of long sums may leave a value a little outside its range. */
const within01 = (value: number): number => Math.min(1, Math.max(0, value));
