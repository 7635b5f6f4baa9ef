// A sample's picture, video or text. Small pictures keep their pixels sharp; videos play by themselves while in sight.

import { html, useEffect, useRef, useState } from "../lib/html.js";

const SMALL = 160;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** `play` false keeps a video still, with controls. */
export function Media({ sample, alt = sample.prompt, play = true, controls = false }) {
  const [gone, setGone] = useState(false);
  const failed = () => setGone(true);
  useEffect(() => setGone(false), [sample.media]);
  if (gone)
    return html`
      <span class="gone">No longer kept</span>
    `;
  if (sample.media_type.startsWith("video/"))
    return html`
      <${Film} ...${{ sample, alt, play, controls, failed }} />
    `;
  if (sample.media_type === "text/plain")
    return html`
      <${Answer} ...${{ sample, failed }} />
    `;
  if (sample.media_type.startsWith("audio/"))
    return html`
      <audio src=${sample.media} aria-label=${alt} controls preload="metadata" onError=${failed}></audio>
    `;
  if (!sample.media_type.startsWith("image/"))
    return html`
      <span class="gone">${sample.media_type}</span>
    `;
  return html`
    <img src=${sample.media} alt=${alt} decoding="async" onLoad=${sharpen} onError=${failed} />
  `;
}

/** What a policy that writes text answered. */
function Answer({ sample, failed }) {
  const [text, setText] = useState("");
  useEffect(() => {
    let wanted = true;
    fetch(sample.media)
      .then((answer) => (answer.ok ? answer.text() : Promise.reject(new Error(answer.statusText))))
      .then((found) => wanted && setText(found))
      .catch(() => wanted && failed());
    return () => {
      wanted = false;
    };
  }, [sample.media]);
  return html`<pre class="answer">${text}</pre>`;
}

function Film({ sample, alt, play, controls, failed }) {
  const film = useRef(null);
  useEffect(() => {
    const element = film.current;
    if (!play || calm.matches) return undefined;
    const watch = new IntersectionObserver(([entry]) => {
      if (entry.isIntersecting) element.play().catch(() => {});
      else element.pause();
    });
    watch.observe(element);
    return () => watch.disconnect();
  }, [play, sample.media]);
  return html`
    <video
      ref=${film}
      src=${sample.media}
      aria-label=${alt}
      muted
      loop
      playsinline
      preload="auto"
      controls=${controls || !play || calm.matches}
      onLoadedMetadata=${sharpen}
      onError=${failed}
    ></video>
  `;
}

/** Scaled up by smoothing, a picture of 64 pixels is a blur. */
function sharpen({ target }) {
  const width = target.naturalWidth ?? target.videoWidth;
  target.classList.toggle("pixels", Boolean(width) && width <= SMALL);
}
