// The one place that names the view library: `html` makes elements from template literals, the rest are its hooks.
// Text is always set as text: nothing on this page parses strings as HTML.

import htm from "../vendor/htm.js";
import { Fragment, createContext, h, render } from "../vendor/preact.js";

export { useCallback, useContext, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/hooks.js";
export { Fragment, createContext, render };
export const html = htm.bind(h);

/** Joins the class names that are set. */
export const classes = (...names) => names.filter(Boolean).join(" ");
