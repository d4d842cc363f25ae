"""Errors that a user can cause and mend; the command line prints one line and exits with 2."""


class KvjaxError(ValueError):
    """Base of every error whose message names a wrong value and the fix."""


class ConfigError(KvjaxError):
    """A configuration value is unknown, out of range, or does not go together with another."""


class CapacityError(KvjaxError):
    """A cache or a context is too small for the tokens that it is asked to hold."""


class CheckpointError(KvjaxError):
    """A checkpoint is missing, broken, incomplete or of an unknown kind."""


class MissingPackageError(KvjaxError):
    """An optional package is not installed; the message names the extra that brings it."""
