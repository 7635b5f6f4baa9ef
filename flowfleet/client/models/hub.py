"""Uploads a model's folder to the Hugging Face Hub with huggingface_hub (`pip install -e '.[hub]'`).

The user's own login counts (HF_TOKEN, `hf auth login`), and HF_ENDPOINT where it is set.
"""

import re
from pathlib import Path

from huggingface_hub import HfApi, errors
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from flowfleet.api.problems import ApiError
from flowfleet.client.download import MARK

_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)


def upload(folder: Path, repo: str, message: str, *, private: bool = False) -> str:
    """Makes the repository if it is not there, and commits the folder. Returns its URL. Done again it changes nothing.

    Raises ValueError for a name that is not ORG/NAME, and ApiError with the hub's words.
    """
    if not _NAME.fullmatch(repo):
        raise ValueError(f"{repo!r} is not the name of a repository: give ORG/NAME")
    api = HfApi()
    try:
        place = api.create_repo(repo, private=private or None, exist_ok=True, repo_type="model")
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message, ignore_patterns=[MARK])
    except LocalTokenNotFoundError:
        raise ApiError(401, "no login to the hub: run `hf auth login`, or set HF_TOKEN") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        raise ApiError(status, f"the hub refused the upload to {repo}: {error.server_message or error}") from None
    except (OSError, errors.HTTPError) as error:  # type: ignore[attr-defined]  # no network, or the hub's offline mode
        raise ApiError(
            0,
            f"the hub at {api.endpoint} cannot be reached ({type(error).__name__}: {error}): check the network and "
            "HF_ENDPOINT, and push again",
        ) from None
    return str(place)
