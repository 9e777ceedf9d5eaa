"""What the answers and failures of an S3 service mean: which are worth a retry, and what to do about the others.

It must not know which operation failed, nor send anything.
"""

from __future__ import annotations

from botocore import exceptions as failures
from botocore.exceptions import BotoCoreError, ClientError

from incremental_ckpt.errors import StorageError

FAILURES: tuple[type[Exception], ...] = (ClientError, BotoCoreError, OSError, RecursionError)
"""What a call of a boto3 client raises, and the reading of a body. A redirect to nowhere it follows without end."""

MISSING = frozenset({"404", "NoSuchKey", "NotFound"})
EXISTS = frozenset({"412", "PreconditionFailed"})
CHANGED = EXISTS
"""The same answer: the condition was If-None-Match, or If-Match."""
PAST_THE_END = frozenset({"416", "InvalidRange"})
UPLOAD_GONE = frozenset({"NoSuchUpload"})

_RETRYABLE_CODES = {
    "BadDigest",  # damaged on the way
    "ConditionalRequestConflict",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}
_RETRYABLE_STATUS = {408, 429, 500, 502, 503, 504, 509}

_NO_CREDENTIALS = (
    "configure credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role of the machine"
)
_CHECK_CREDENTIALS = "check the credentials and the profile"
_CHECK_PERMISSIONS = (
    "the credentials do not allow it: they need s3:ListBucket, s3:GetObject and, to write, s3:PutObject, "
    "s3:DeleteObject and s3:AbortMultipartUpload"
)
_CHECK_REGION = "the bucket is in another region: give ?region=NAME or AWS_REGION"
_CHECK_BUCKET = "check the name of the bucket, and the endpoint"
_CHECK_ENDPOINT = "check the endpoint (?endpoint_url=, AWS_ENDPOINT_URL) and the network"
_ADVICE = {
    "301": _CHECK_REGION,
    "403": _CHECK_PERMISSIONS,
    "404": _CHECK_BUCKET,
    "AccessDenied": _CHECK_PERMISSIONS,
    "AllAccessDisabled": _CHECK_PERMISSIONS,
    "AuthorizationHeaderMalformed": _CHECK_REGION,
    "EntityTooLarge": "the service does not take objects of this size: use smaller packs",
    "ExpiredToken": "the credentials have expired: renew them",
    "IllegalLocationConstraintException": _CHECK_REGION,
    "InvalidAccessKeyId": _CHECK_CREDENTIALS,
    "InvalidBucketName": _CHECK_BUCKET,
    "InvalidToken": _CHECK_CREDENTIALS,
    "NoSuchBucket": _CHECK_BUCKET,
    "NotImplemented": "the service lacks what a store must offer: see docs/stores.md",
    "PermanentRedirect": _CHECK_REGION,
    "QuotaExceeded": "free space or prune old checkpoints",
    "RequestTimeTooSkewed": "set the clock of this machine",
    "SignatureDoesNotMatch": _CHECK_CREDENTIALS,
    "XMinioStorageFull": "free space or prune old checkpoints",
}
_ADVICE_BY_TYPE: dict[type[Exception], str] = {
    failures.NoCredentialsError: _NO_CREDENTIALS,
    failures.PartialCredentialsError: _NO_CREDENTIALS,
    failures.TokenRetrievalError: "sign in again (aws sso login)",
    failures.UnauthorizedSSOTokenError: "sign in again (aws sso login)",
    failures.ProfileNotFound: "check ?profile= and AWS_PROFILE",
    failures.InvalidRegionError: "check ?region= and AWS_REGION",
    failures.ParamValidationError: _CHECK_BUCKET,
    failures.SSLError: "check the certificate of the endpoint (AWS_CA_BUNDLE)",
    failures.HTTPClientError: _CHECK_ENDPOINT,
    failures.ConnectionError: _CHECK_ENDPOINT,
    RecursionError: f"the service redirects and names no region: {_CHECK_ENDPOINT}, and the region",
    ValueError: _CHECK_ENDPOINT,
}
# A connection that fails or breaks off, and a service of the machine that hands out credentials and did not answer.
_RETRYABLE_TYPES = (
    failures.HTTPClientError,
    failures.ConnectionError,
    failures.ResponseStreamingError,
    failures.IncompleteReadError,
    failures.CredentialRetrievalError,
    failures.MetadataRetrievalError,
    OSError,
)


def code_of(error: Exception) -> str:
    """S3's name of an error, or the HTTP status where there is none; empty for what is no answer of S3."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def is_retryable(error: Exception) -> bool:
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return code_of(error) in _RETRYABLE_CODES or status in _RETRYABLE_STATUS
    return isinstance(error, _RETRYABLE_TYPES)


def storage_error(action: str, error: Exception) -> StorageError:
    """Args: action: what was tried, as in ``write data/x to s3://bucket/run``."""
    if isinstance(error, ClientError):
        reason = f"{code_of(error)}: {error.response.get('Error', {}).get('Message') or 'no reason was given'}"
    else:
        reason = f"{type(error).__name__}: {error}"
    advice = _ADVICE.get(code_of(error)) or next(
        (text for kind, text in _ADVICE_BY_TYPE.items() if isinstance(error, kind)), ""
    )
    line = " ".join(f"cannot {action}: {reason}".split()).rstrip(".")
    return StorageError(f"{line}: {advice}" if advice else line, retryable=is_retryable(error))
