"""`python -m tests.lab.attacks`: each attack, the test that makes it, its control, and the counter that rises.

The control is in the same test: the same path with the right key, token or bytes, which works. The counters are the
names of ppsmoke/cluster/counters.py (Node.counters()), or say whose they are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attack:
    what: str
    test: str  # path::name
    control: str
    counter: str


def _in(path: str, *rows: tuple[str, str, str, str]) -> list[Attack]:
    return [Attack(what, f"{path}::{test}", control, counter) for what, test, control, counter in rows]


ATTACKS = [
    *_in(
        "tests/cluster/test_link.py",
        ("wrong key on a connection", "test_a_stranger_is_dropped_without_a_byte_and_the_listener_lives_on",
         "a node with the key is linked", "door.wrong-preamble"),
        ("a preamble for another node", "test_a_stranger_is_dropped_without_a_byte_and_the_listener_lives_on",
         "a node with the key is linked", "door.wrong-target"),
        ("a connection that says nothing", "test_a_stranger_that_says_nothing_is_dropped_after_the_handshakes_time",
         "a node with the key is linked", "door.too-slow"),
        ("hostile and oversized frames",
         "test_a_frame_that_is_none_of_ours_closes_the_link_with_a_reason_and_nothing_else",
         "another node is linked", "link.bad-frame"),
        ("an impossible acknowledgement",
         "test_a_frame_that_is_none_of_ours_closes_the_link_with_a_reason_and_nothing_else",
         "another node is linked", "link.bad-ack"),
        ("frames before HELLO", "test_before_hello_nothing_else_is_taken", "a node is linked", "handshake.bad-frame"),
    ),
    *_in(
        "tests/cluster/test_impostors.py",
        ("another run's key", "test_another_runs_identity_gets_no_link", "the role's own node is linked",
         "handshake.wrong-certificate"),
        ("no certificate", "test_whoever_shows_no_certificate_gets_no_link", "a node with one is linked",
         "handshake.no-certificate"),
        ("a stage as another stage or as the orchestrator", "test_a_stage_cannot_pose_as_another_node",
         "the one it posed as is linked", "handshake.wrong-node"),
        ("another's id in HELLO", "test_a_hello_with_another_id_than_the_certificates_is_refused",
         "a node with its own is linked", "handshake.wrong-node"),
    ),
    *_in(
        "tests/cluster/test_resolving.py",
        ("a stage that claims another's name", "test_a_lying_claimant_is_skipped_however_new_its_claim",
         "the owner's claim resolves", "link.false-name"),
    ),
    *_in(
        "tests/test_inbox.py",
        ("a stage that speaks for another to the orchestrator",
         "test_a_stage_speaks_for_itself_alone_and_only_the_last_one_answers", "the right stage is heard",
         "Inbox.refused"),
    ),
    *_in(
        "tests/pipeline/test_intake.py",
        ("a stage that sends what another has to", "test_what_is_not_its_senders_to_send_is_not_worked_on",
         "the right sender's is worked on", "Intake.unwelcome"),
    ),
    *_in(
        "tests/cluster/test_attacks.py",
        ("wrong key on a datagram", "test_datagrams_are_let_in_once_in_any_order_and_with_the_key_alone",
         "the member's are opened", "datagram.wrong-tag"),
        ("replayed and reordered datagrams", "test_datagrams_are_let_in_once_in_any_order_and_with_the_key_alone",
         "reordered ones are opened, once", "datagram.replayed"),
        ("a replayed preamble", "test_a_preamble_that_was_overheard_opens_no_door_a_second_time",
         "the first time it opens", "door.replayed"),
        ("a preamble changed at every byte", "test_a_preamble_with_any_byte_changed_opens_no_door",
         "unchanged it opens", "door.wrong-preamble"),
        ("a record changed at every byte", "test_a_record_with_any_byte_changed_ends_the_link_and_harms_no_message",
         "before and after it messages arrive, once", "link.tampered"),
        ("a handshake changed at a byte", "test_a_handshake_with_a_byte_changed_makes_no_link_or_the_right_one",
         "the next one makes the link, and the message arrives", "door.wrong-preamble"),
        ("truncated TLS", "test_a_stream_cut_anywhere_ends_the_link_and_harms_no_message",
         "before and after it messages arrive, once", "link.cut"),
        ("a member that lies in gossip", "test_a_member_that_lies_in_gossip_is_not_believed_and_its_truths_are",
         "its true name resolves", "gossip.implausible-epoch"),
        ("a member's junk mailboxes", "test_junk_for_mailboxes_that_nobody_asked_for_is_dropped_beyond_a_bound",
         "one that is asked for gets its message", "link.junk-mailbox"),
        ("a member that ignores its window",
         "test_a_peer_that_sends_on_without_acknowledgement_loses_its_link_at_the_windows_end",
         "an honest node waits, and all arrives", "link.over-window"),
        ("a member that asks and does not read", "test_a_peer_that_asks_and_does_not_read_the_answers_loses_its_link",
         "one question is answered", "link.unread"),
        ("a relay's tokens without end", "test_a_relay_that_hands_out_tokens_without_end_is_not_followed",
         "the first 64 are waited for", "link.too-many-tokens"),
        ("a message that is too long",
         "test_a_message_that_claims_more_than_any_may_have_is_refused_by_its_first_chunk",
         "a short one arrives", "link.bad-data"),
    ),
    *_in(
        "tests/cluster/test_relay.py",
        ("a stolen relay token", "test_a_token_is_good_once_for_its_pair_alone", "its owner's leg is let in",
         "relay.bad-token"),
        ("a stolen relay token under its owner's id",
         "test_a_thief_of_a_token_that_lies_about_its_id_as_well_gets_a_leg_and_no_link", "its owner's leg is let in",
         "handshake.wrong-node"),
    ),
    *_in(
        "tests/cluster/test_floods.py",
        ("a flood of connections", "test_a_flood_stops_no_request_keeps_nobody_out_and_little_of_it_stays",
         "requests before, during and after; an honest dial during", "door.evicted"),
        ("a flood of half-open handshakes", "test_a_flood_stops_no_request_keeps_nobody_out_and_little_of_it_stays",
         "the same", "door.handshake-evicted"),
        ("a flood of one preamble", "test_a_flood_stops_no_request_keeps_nobody_out_and_little_of_it_stays",
         "the same", "door.replayed"),
        ("a flood of random datagrams", "test_a_flood_stops_no_request_keeps_nobody_out_and_little_of_it_stays",
         "the same", "datagram.wrong-tag"),
        ("a member's flood of junk", "test_a_members_flood_of_junk_stops_no_request_and_little_of_it_stays",
         "requests are answered", "link.junk-mailbox"),
    ),
    *_in(
        "tests/lab/test_fuzz_cluster.py",
        ("mutated inputs for each decoder", "test_two_thousand_hostile_inputs_give_the_documented_error_or_none",
         "valid inputs are accepted; a broken decoder is found", "Outcome.refused"),
    ),
]  # fmt: skip


def main() -> None:
    width = max(len(attack.what) for attack in ATTACKS)
    for attack in ATTACKS:
        print(f"{attack.what:{width}s} | {attack.test} | {attack.control} | {attack.counter}")


if __name__ == "__main__":
    main()
