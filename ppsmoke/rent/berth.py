"""One stage's machine, from an offer to a node that starts; another machine in its place where one lets us down."""

from __future__ import annotations

from ppsmoke.cluster.addresses import Endpoint
from ppsmoke.errors import RentError
from ppsmoke.rent.booting import Boot
from ppsmoke.rent.create import Rented
from ppsmoke.rent.fleet import StageSpec
from ppsmoke.rent.offers import Candidate
from ppsmoke.rent.plan import MAX_REPLACEMENTS
from ppsmoke.rent.rentals import Rental
from ppsmoke.rent.shipyard import HostFailed, Shipyard
from ppsmoke.rent.starting import Bad, Starting, Up

DEARER = 1.1  # an instance that costs so many times what its offer said is told of
STILL_S = 20.0  # what does not change is said again after so long
POLLS = 60  # spec, section 6: so many looks, 5 s apart, for an instance to run


class Berth:
    """One stage's place in the run."""

    def __init__(self, stage: int, yard: Shipyard) -> None:
        self._stage = stage
        self._yard = yard
        self._looks = 0
        self._dearer: set[int] = set()  # instances of which that was said

    async def bring_up(self) -> None:
        """Until the node is being started somewhere. Raises RentError and whatever else ends the run."""
        generation, candidate = 0, await self._yard.market.take(self._stage)
        while True:
            spec = self._yard.spec_of(self._stage, generation)
            rental = await self._create(spec, candidate)
            try:
                await self._start(rental, spec)
                return
            except HostFailed as failed:
                rental.failure = failed.why
                candidate = await self._replacement(rental, failed)
                generation += 1

    async def _create(self, spec: StageSpec, candidate: Candidate) -> Rental:
        """An instance on this offer, or on the next that can be had."""
        yard = self._yard
        while True:
            offer = candidate.offer
            made = await yard.creator.create(offer, lambda label: yard.terms.machine(spec), stage=self._stage)
            if isinstance(made, Rented):
                rental = Rental(
                    stage=self._stage,
                    generation=spec.generation,
                    candidate=candidate,
                    instance_id=made.instance_id,
                    label=made.label,
                    made_at=yard.api.clock.wall(),
                    download_bytes=yard.download_bytes,
                )
                yard.rented(rental)
                place = offer.place or "an unknown place"
                self._say(f"instance {made.instance_id}: {offer.gpu_name} in {place}, ${offer.dph_total:.3f} an hour")
                return rental
            self._say(f"offer {offer.id} could not be had ({made.text}); taking the next")
            yard.market.lost(offer, made.text, stage=self._stage)
            candidate = await yard.market.take(self._stage)

    async def _start(self, rental: Rental, spec: StageSpec) -> None:
        """From its create to its node's start. Raises HostFailed, or RentError after POLLS looks."""
        yard = self._yard
        pull_s = yard.terms.pull_s(rental.candidate.offer)
        starting = Starting(made_at=yard.api.clock.now(), pull_s=pull_s)
        up = await self._until_up(rental, starting)
        self._say(f"running, its port is {up.address}:{up.tcp_port}")
        yard.running += 1
        if yard.running == yard.num_stages:
            yard.progress.phase("boot")
        try:
            report = await Boot(yard, rental, up, starting).run(spec)
        except HostFailed:
            yard.running -= 1
            yard.progress.phase("rent")
            raise
        self._say(f"its node starts, {report.seconds:.1f} s after the first contact")
        endpoint = Endpoint(
            role=spec.identity.role,
            generation=spec.generation,
            node_id=spec.identity.node_id,
            host=up.address,
            tcp_port=up.tcp_port,
            udp_port=up.udp_port,
        )
        yard.started(endpoint, spec)

    async def _until_up(self, rental: Rental, starting: Starting) -> Up:
        began = said_at = self._yard.api.clock.now()
        shown = ""
        while True:
            looked = await self._yard.view.next_look()
            self._looks += 1
            verdict = None
            if looked:
                self._yard.look_at(rental)
                verdict = starting.see(self._yard.view.of(rental.instance_id), self._yard.api.clock.now())
            if isinstance(verdict, Up):
                rental.ran = True
                return verdict
            if isinstance(verdict, Bad):
                raise HostFailed(verdict.why, phase="rent", another=verdict.another == "may help")
            now = self._yard.api.clock.now()
            if rental.shows() != shown or now - said_at >= STILL_S:
                still = f"still {shown}, {now - began:.0f} s after its create" if rental.shows() == shown else ""
                shown, said_at = rental.shows(), now
                self._say(still or shown)
                self._compare_price(rental)
            if self._looks >= POLLS:
                raise RentError(
                    f"not running after {POLLS} looks: {shown}",
                    phase="rent",
                    stage=self._stage,
                    hint="its host is slow or broken: try again, or another --gpu or --region",
                )

    def _compare_price(self, rental: Rental) -> None:
        """The plan counts on the offer's price; the instance is billed by its own."""
        offered, billed = rental.candidate.offer.dph_total, rental.latest.dph_total if rental.latest else 0.0
        if billed > DEARER * offered and rental.instance_id not in self._dearer:
            self._dearer.add(rental.instance_id)
            self._say(f"warning: it costs ${billed:.3f} an hour, and its offer said ${offered:.3f}")

    async def _replacement(self, rental: Rental, failed: HostFailed) -> Candidate:
        """Another offer instead of a failed host's, within the design's bounds. Raises RentError outside of them."""
        yard = self._yard
        if not failed.another:
            raise failed.error(self._stage) from failed
        if yard.replacements == 0:
            raise failed.error(self._stage, f"; {MAX_REPLACEMENTS} hosts have been replaced already") from failed
        yard.replacements -= 1
        yard.market.failed(rental.candidate.offer)
        try:
            candidate = await yard.market.take(self._stage, within_s=yard.deadline.remaining())
        except RentError as error:
            raise failed.error(self._stage, f"; {error.cause}") from failed
        self._say(f"{failed.why}; another host takes its place")
        yard.give_up(rental)
        return candidate

    def _say(self, text: str) -> None:
        self._yard.progress.say(text, stage=self._stage)
