"""REST: who asks and what they may do; login and logout of browsers."""

import logging

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from flowfleet.api.access import Session
from flowfleet.errors import InvalidRequest
from services.controller.api.auth import address_of, over_tls, session_token
from services.controller.api.body import read_object
from services.controller.api.dependencies import MaybeHolder, Services, Use
from services.controller.api.keys import Holder
from services.controller.api.sessions import SESSION_S, cookie_name

log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/session", tags=["session"])


@router.get("")
async def show_session(request: Request, use: Use, holder: MaybeHolder) -> Session:
    """Tells whether a key is needed, and what the caller may do."""
    return await _shown(request, use, holder)


@router.post("")
async def log_in(request: Request, response: Response, use: Use) -> Session:
    """Opens a session for a browser. The cookie stands for the key from then on."""
    key = (await read_object(request)).get("key")
    if not isinstance(key, str):
        raise InvalidRequest('key: send {"key": "…"} with the API key')
    if not use.keys.required:
        raise InvalidRequest("this controller has no API keys: use it without a login")
    if (holder := await use.keys.checked(key, address_of(request.scope))) is None:
        log.warning("login refused: the key opens nothing")
        raise HTTPException(401, "this key opens nothing: check it, or ask the operator for another")
    token, ends = await use.sessions.open(holder)
    secure = over_tls(request.scope, request.headers)
    name = cookie_name(request.headers)
    response.set_cookie(name, token, max_age=SESSION_S, path="/", secure=secure, httponly=True, samesite="strict")
    response.headers["Cache-Control"] = "no-store"
    log.info("session opened: %s", holder.name)
    return Session(login=True, name=holder.name, may=holder.may, expires_at=ends)


@router.delete("", status_code=204)
async def log_out(request: Request, response: Response, use: Use) -> None:
    """Ends the browser's session and its streams."""
    if token := session_token(request.headers):
        await use.sessions.close(token)
    response.delete_cookie(cookie_name(request.headers), path="/", httponly=True, samesite="strict")


async def _shown(request: Request, use: Services, holder: Holder | None) -> Session:
    if holder is None:
        return Session(login=True)
    ends = await use.sessions.ends(session_token(request.headers)) if holder.session else None
    return Session(login=use.keys.required, name=holder.name, may=holder.may, expires_at=ends)
