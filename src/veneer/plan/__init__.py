"""The memory and communication that a sharded language model needs, for `veneer plan`.

    models    the weights and caches of a model, from its `config.json`
    splits    the bytes that a device holds and receives, for each split over devices

No array is allocated: all arrays are abstract.
"""

from .models import ModelShapes as ModelShapes
from .models import model_of as model_of
from .splits import DeviceRates as DeviceRates
from .splits import PlannedStep as PlannedStep
from .splits import Split as Split
from .splits import SplitPlan as SplitPlan
from .splits import plans as plans
