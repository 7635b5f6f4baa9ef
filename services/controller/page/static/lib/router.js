// Where one is: `#/jobs/ID/gallery?step=3` is { parts: ["jobs", ID, "gallery"], query: { step: "3" } }.

import { useEffect, useState } from "./html.js";

export function here() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  return { parts, query: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

/** The hash of a place; parameters without a value are left out. */
export function link(parts, query = {}) {
  const known = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const words = new URLSearchParams(known).toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${words ? `?${words}` : ""}`;
}

/** Goes there; `replace` keeps the way back short. */
export function go(hash, replace = false) {
  if (replace) {
    history.replaceState(null, "", hash);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = hash;
}

export function useRoute() {
  const [route, setRoute] = useState(here);
  useEffect(() => {
    const changed = () => setRoute(here());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}
