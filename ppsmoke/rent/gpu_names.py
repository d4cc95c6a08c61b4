"""GPU names as the API spells them: it compares letter by letter and answers a near miss with no offers. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# What vast.ai lists, single GPUs that can run us; names that are newer than this list pass as they are typed.
GPU_NAMES = tuple(
    """A10|A100 PCIE|A100 SXM4|A100X|A16|A2|A30|A40|B200|B300 SXM6 AC|GH200 SXM|GTX 1060|GTX 1070|GTX 1070 Ti|GTX 1080
|GTX 1080 Ti|GTX 1650|GTX 1650 S|GTX 1660|GTX 1660 S|GTX 1660 Ti|H100 NVL|H100 PCIE|H100 SXM|H200|H200 NVL|L4|L40|L40S
|Q RTX 4000|Q RTX 6000|Q RTX 8000|RTX 2000Ada|RTX 2060|RTX 2060S|RTX 2070|RTX 2070S|RTX 2080|RTX 2080 Ti|RTX 2080S
|RTX 3050|RTX 3060|RTX 3060 laptop|RTX 3060 Ti|RTX 3070|RTX 3070 laptop|RTX 3070 Ti|RTX 3080|RTX 3080 Ti|RTX 3090
|RTX 3090 Ti|RTX 4000Ada|RTX 4060|RTX 4060 Ti|RTX 4070|RTX 4070 Ti|RTX 4070S|RTX 4070S Ti|RTX 4080|RTX 4080S|RTX 4090
|RTX 4090D|RTX 4500Ada|RTX 5000Ada|RTX 5060|RTX 5060 Ti|RTX 5070|RTX 5070 Ti|RTX 5080|RTX 5090|RTX 5880Ada|RTX 6000Ada
|RTX A2000|RTX A4000|RTX A4500|RTX A5000|RTX A6000|RTX PRO 4000|RTX PRO 4500|RTX PRO 5000|RTX PRO 6000 S
|RTX PRO 6000 WS|Tesla P100|Tesla P4|Tesla P40|Tesla T4|Tesla V100|Titan RTX|Titan V|Titan Xp""".replace(
        "\n", ""
    ).split("|")
)


def gpu_name(typed: str) -> str:
    """What to send for what was typed: `RTX_4090`, `rtx 4090` and `4090` are "RTX 4090". An unknown name is kept, with
    its underscores as spaces: new GPUs appear before new versions of this list."""
    plain = " ".join(typed.replace("_", " ").split())
    key = _key(plain)
    exact = [name for name in GPU_NAMES if _key(name) == key]
    ends = [name for name in GPU_NAMES if _key(name) == f"rtx{key}"]
    return (exact or ends or [plain])[0]


def near_names(name: str, also: Iterable[str] = ()) -> list[str]:
    """At most three known names that look like this one, nearest first; none if it is known itself."""
    by_key = {_key(known): known for known in (*GPU_NAMES, *also)}
    if _key(name) in by_key:
        return []
    return [by_key[key] for key in difflib.get_close_matches(_key(name), by_key, n=3, cutoff=0.6)]


def _key(name: str) -> str:
    return "".join(name.casefold().replace("_", " ").split())
