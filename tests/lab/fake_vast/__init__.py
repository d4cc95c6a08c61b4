"""A faithful fake of vast.ai: `with FakeVast() as fake:` in tests, `python -m tests.lab.fake_vast` by hand."""

from tests.lab.fake_vast.fake import DECOY_LABELS, FakeVast
from tests.lab.fake_vast.inside import Inside
from tests.lab.fake_vast.market import Offer, default_market, offer

__all__ = ["DECOY_LABELS", "FakeVast", "Inside", "Offer", "default_market", "offer"]
