// Who is logged in and what they may do; views read it by `useSession`.

import { createContext, useContext } from "./html.js";

export const Session = createContext({ login: false, name: "", may: null, expires_at: null });
export const useSession = () => useContext(Session);

/** Whether the key may steer jobs: only then the page has buttons. */
export const useMaySteer = () => useSession().may === "steer";
