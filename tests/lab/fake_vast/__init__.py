"""A faithful fake of vast.ai: `with FakeVast() as fake:` in tests, `python -m tests.lab.fake_vast` by hand.

    with FakeVast() as fake:                        # time stands still; nothing really runs
        fake.fault("create.reset-after")            # the next create rents and then resets the connection
        fake.on("destroy", "before", hook)          # hook(request, instance id), before the effect
        ...                                         # a client on fake.url with fake.key
        fake.clock.advance(60)
        assert fake.ledger()["live"] == [] and fake.ledger()["decoys_touched"] == 0
    with FakeVast(scale=1.0, inside=Inside()) as fake:  # in real time; start commands run, ports are mapped

A pure core (market, search, order, instances, billing, pages, account) under routes.py and service.py (keys, limits,
faults, hooks); server.py has the sockets; host.py starts and ends containers.py's containers as the timelines say.
"""

from tests.lab.fake_vast.fake import DECOY_LABELS, FakeVast
from tests.lab.fake_vast.inside import Inside
from tests.lab.fake_vast.market import Offer, default_market, offer

__all__ = ["DECOY_LABELS", "FakeVast", "Inside", "Offer", "default_market", "offer"]
