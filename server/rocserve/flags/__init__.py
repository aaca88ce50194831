"""The flags of `rocserve serve`: tritonserver's names, and a few of our own, declared in settings/.

A flag of tritonserver whose subject this version does not serve is refused with a message, unless it switches its
subject off.
"""

from rocserve.flags.reading import FlagError as FlagError
from rocserve.flags.reading import add_serve_flags as add_serve_flags
from rocserve.flags.reading import settings_again as settings_again
from rocserve.flags.reading import settings_from as settings_from
