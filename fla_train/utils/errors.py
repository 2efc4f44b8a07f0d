"""What kind of fault keeps data from being prepared; light like `chunks`, and imported by every command."""


class Interrupted(ValueError):
    """The disk, the network or a killed process is at fault, not the request: another attempt may go on."""
