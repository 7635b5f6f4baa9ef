// Who is logged in and what they may do; views read it by `useSession`.

import { createContext, useContext } from "./html.js";

export const Session = createContext({ login: false, name: "", may: null, expires_at: null });
export const useSession = () => useContext(Session);

/** Whether the key may steer jobs: only then the page has buttons. */
export const useMaySteer = () => useSession().may === "steer";

const LINK = "#key=";

/** The key in a link that `flowfleet up` printed; it leaves the address at once. */
export function takeKey() {
  if (!location.hash.startsWith(LINK)) return "";
  const key = decodeURIComponent(location.hash.slice(LINK.length));
  history.replaceState(null, "", "#/");
  return key;
}

addEventListener("hashchange", () => location.hash.startsWith(LINK) && location.reload());
