"""What a model needs of many devices, by its `config.json` alone: `veneer plan`.

    models    the shapes of a model's weights and caches, with names for their axes
    placing   weights quantised and cut over the devices of a split, and their bytes
    splits    what each split takes: bytes of a device, and what it receives in a step

Nothing is allocated: arrays are abstract, quantised and cut as `vn.quant.quantize` and
`vn.device_put` would.
"""

from .models import ModelShapes as ModelShapes
from .models import model_of as model_of
from .placing import Split as Split
from .splits import DeviceRates as DeviceRates
from .splits import PlannedStep as PlannedStep
from .splits import SplitPlan as SplitPlan
from .splits import plans as plans
