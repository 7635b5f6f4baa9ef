// Rows of one height, of which only those in sight (and a few around) exist. The window scrolls, or a box.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../lib/html.js";

const AROUND = 6;

/** First and one-after-last index in sight. `box` is the element that scrolls; null: the window. */
export function inSight(top, height, size, count, around = AROUND) {
  const first = Math.max(0, Math.floor(top / size) - around);
  return [Math.min(first, count), Math.min(count, Math.ceil((top + height) / size) + around)];
}

/** Draws `row(item, index)` for those in sight of the window. */
export function WindowRows({ items, size, row, ...attributes }) {
  const list = useRef(null);
  const [[from, to], setRange] = useState([0, Math.min(items.length, 30)]);
  useLayoutEffect(() => {
    const look = () => {
      const top = -list.current.getBoundingClientRect().top;
      const next = inSight(top, innerHeight, size, items.length);
      setRange((before) => (before[0] === next[0] && before[1] === next[1] ? before : next));
    };
    look();
    addEventListener("scroll", look, { passive: true });
    addEventListener("resize", look);
    return () => {
      removeEventListener("scroll", look);
      removeEventListener("resize", look);
    };
  }, [items.length, size]);
  const placed = (index) => ({ top: `${index * size}px`, height: `${size}px` });
  return html`
    <div ref=${list} style=${{ height: `${items.length * size}px` }} class="virtual" ...${attributes}>
      ${items.slice(from, to).map((item, offset) => row(item, from + offset, placed(from + offset)))}
    </div>
  `;
}

/** False from a change of `place` on until it has rested for `ms` and `isReady()`, at most `most` times `ms`. */
export function useRested(place, isReady, ms = 250, most = 8) {
  const [rested, setRested] = useState("");
  useEffect(() => {
    let looks = 0;
    const timer = setInterval(() => {
      looks += 1;
      if (!isReady() && looks < most) return;
      clearInterval(timer);
      setRested(place);
    }, ms);
    return () => clearInterval(timer);
  }, [place]);
  return rested === place;
}

/** Scroll position and size of a box, as state: { top, left, width, height }. */
export function useScrolled(box) {
  const [seen, setSeen] = useState({ top: 0, left: 0, width: 0, height: 0 });
  useEffect(() => {
    const element = box.current;
    if (!element) return undefined;
    const look = () =>
      setSeen({
        top: element.scrollTop,
        left: element.scrollLeft,
        width: element.clientWidth,
        height: element.clientHeight,
      });
    const sized = new ResizeObserver(look);
    look();
    sized.observe(element);
    element.addEventListener("scroll", look, { passive: true });
    return () => {
      sized.disconnect();
      element.removeEventListener("scroll", look);
    };
  }, []);
  return seen;
}
