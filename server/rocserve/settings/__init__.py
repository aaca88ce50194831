"""The settings of a server: frozen dataclasses whose fields declare their flags."""

from rocserve.settings.front_ends import GrpcSettings as GrpcSettings
from rocserve.settings.front_ends import HttpSettings as HttpSettings
from rocserve.settings.front_ends import LogSettings as LogSettings
from rocserve.settings.front_ends import MetricsSettings as MetricsSettings
from rocserve.settings.front_ends import RestrictedProtocols as RestrictedProtocols
from rocserve.settings.repository import ControlMode as ControlMode
from rocserve.settings.repository import ReadinessRule as ReadinessRule
from rocserve.settings.repository import RepositorySettings as RepositorySettings
from rocserve.settings.repository import ResidencySettings as ResidencySettings
from rocserve.settings.server import DEFAULT_MAX_BATCH_SIZE as DEFAULT_MAX_BATCH_SIZE
from rocserve.settings.server import KEEP_USER as KEEP_USER
from rocserve.settings.server import NO_TIME_LIMITS as NO_TIME_LIMITS
from rocserve.settings.server import AdminAddresses as AdminAddresses
from rocserve.settings.server import EngineSettings as EngineSettings
from rocserve.settings.server import RateLimitResource as RateLimitResource
from rocserve.settings.server import ServerSettings as ServerSettings
from rocserve.settings.server import TimeLimits as TimeLimits
from rocserve.settings.server import WorkerSettings as WorkerSettings
from rocserve.settings.server import default_front_ends as default_front_ends
from rocserve.settings.server import engine_settings as engine_settings
