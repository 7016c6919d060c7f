"""Skip tests of our error messages in runs that check annotations.

There, the annotation checker rejects an argument of the wrong type before our code sees it.
"""

import jaxtyping
import pytest

ARE_CHECKED = not jaxtyping.config.jaxtyping_disable

#: The mark of a test of our message for an argument whose type contradicts its annotation.
unless_checked = pytest.mark.skipif(ARE_CHECKED, reason="the annotation checker rejects it first")
