"""Credentials of an AWS profile, for buckets of S3: from the files in `~/.aws`, with single sign-on and assumed roles.

What the environment gives (`AWS_ACCESS_KEY_ID`), obstore takes itself, and web identity and instance roles too.
"""

import os
from pathlib import Path
from typing import Any

from holdover.errors import TierError

KEY = "AWS_ACCESS_KEY_ID"
PROFILE_VARIABLES = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE")
FILES = (("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), ("AWS_CONFIG_FILE", "~/.aws/config"))
REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")


def profile_options(url: str, endpoint_given: bool) -> dict[str, Any]:
    """What `obstore.store.from_url` needs besides the URL to use a profile; nothing where there is none to use.

    A profile is used if no key is in the environment, and `AWS_PROFILE` names one or there are files of profiles. Its
    region and `endpoint_url` count where the environment says nothing. Raises TierError if it can't be used.
    """
    named = next((os.environ[each] for each in PROFILE_VARIABLES if os.environ.get(each)), None)
    files = any(Path(os.environ.get(variable, place)).expanduser().exists() for variable, place in FILES)
    if not url.startswith("s3://") or os.environ.get(KEY) or not (named or files):
        return {}
    try:
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        if named is None:
            return {}
        raise TierError(
            f"the AWS profile {named!r} needs boto3, which is not installed: pip install 'holdover[aws]', "
            f"or give {KEY} and AWS_SECRET_ACCESS_KEY in the environment."
        ) from None
    try:
        session = Session(profile=named)
        if session.get_credentials() is None:
            if named is None:  # the files say nothing of credentials: an instance role may
                return {}
            raise TierError(f"the AWS profile {named!r} has no credentials. Look into ~/.aws, or run aws configure.")
        options: dict[str, Any] = {"credential_provider": Boto3CredentialProvider(session)}
        config = {}
        profile = session.get_scoped_config()
        if profile.get("region") and not any(os.environ.get(each) for each in REGION_VARIABLES):
            config["region"] = profile["region"]
        endpoint = profile.get("endpoint_url")
        if endpoint and not endpoint_given:
            config["endpoint"] = endpoint
        return {**options, "config": config}
    except BotoCoreError as error:
        raise TierError(f"the AWS profile {named or 'default'!r} can't be used: {error}") from None
