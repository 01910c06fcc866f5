"""The table of faults in docs/operations.md: log lines and metrics that exist, and the tests that show each row."""

import re
from pathlib import Path

from faults.seen import rows

ROOT = Path(__file__).resolve().parents[2]
SOURCES = "\n".join(
    path.read_text() for part in ("libs", "services") for path in sorted((ROOT / part).glob("*/src/tidemill_*/**/*.py"))
)
FAULTS = "tests/faults/test_faults_"
KILLED = f"{FAULTS}kill.py::test_a_killed_process_costs_no_token"
FROZEN = f"{FAULTS}freeze.py::test_a_frozen_process_costs_a_pause_and_no_token"
FROZEN_IDLE = f"{FAULTS}idle.py::test_a_process_frozen_in_idle_costs_the_next_requests_nothing"
CUT_SERVER = f"{FAULTS}network.py::test_a_server_that_all_are_cut_off_from_costs_no_token"
CUT_SERVER_IDLE = f"{FAULTS}network.py::test_a_server_cut_off_in_idle_costs_the_next_requests_nothing"
CUT = f"{FAULTS}network.py::test_whatever_is_cut_off_until_its_lease_ends_costs_no_token"
CUT_WORKER = f"{FAULTS}network.py::test_a_worker_that_is_cut_off_until_its_lease_ends_costs_no_token"
CUT_RANK = f"{FAULTS}network.py::test_a_rank_that_alone_is_cut_off_costs_attempts_and_no_token"
CUT_GATEWAY = f"{FAULTS}network.py::test_a_gateway_that_is_cut_off_is_the_end_of_its_own_streams_only"
KILLED_WORKER = f"{FAULTS}kill.py::test_a_killed_worker_costs_an_attempt_and_no_token"
KILLED_GATEWAY = f"{FAULTS}kill.py::test_a_killed_gateway_is_the_end_of_its_own_streams_only"
KILLED_RANK = f"{FAULTS}kill.py::test_a_killed_rank_is_replaced_and_costs_no_token"
FROZEN_WORKER = f"{FAULTS}freeze.py::test_a_frozen_worker_is_left_and_may_come_back"
FROZEN_GATEWAY = f"{FAULTS}freeze.py::test_a_frozen_gateway_keeps_its_clients"
FROZEN_RANK = f"{FAULTS}freeze.py::test_a_frozen_rank_is_replaced_and_costs_no_token"
RANK_IDLE = f"{FAULTS}idle.py::test_a_rank_lost_in_idle_is_replaced"
LEASES = [
    f"{FAULTS}membership.py::test_an_ended_lease_costs_a_living_decode_instance_no_stream",
    f"{FAULTS}membership.py::test_an_ended_lease_costs_no_token",
]
LEASE_IDLE = f"{FAULTS}idle.py::test_a_lease_that_ends_in_idle_costs_the_next_requests_nothing"
CLOCK = f"{FAULTS}network.py::test_steps_of_the_clock_cost_no_token_and_no_membership"
SLOW_DISK = f"{FAULTS}preloaded.py::test_a_slow_disk_costs_hits_and_no_token_and_the_store_answers_meanwhile"
STUTTERS = f"{FAULTS}disk.py::test_a_disk_that_stutters_costs_a_pause_and_no_token"
FULL_DISK = f"{FAULTS}disk.py::test_a_full_disk_costs_hits_and_no_token_until_there_is_room_again"
REFUSED = f"{FAULTS}disk.py::test_a_disk_that_refuses_costs_hits_and_no_token_until_it_takes_blocks_again"
DEAF = (
    "tests/integration/test_bad_input_http.py"
    "::test_a_client_that_does_not_read_is_cut_off_and_those_beside_it_are_served"
)
IN_PLACE = (
    f"{FAULTS}membership.py::test_a_worker_killed_and_started_again_at_its_old_address_costs_an_attempt_and_no_token"
)
IDLE = f"{FAULTS}idle.py::test_a_process_killed_in_idle_costs_the_next_requests_nothing"
FORGOTTEN = f"{FAULTS}forgotten.py::test_what_a_worker_forgets_is_tried_again_and_leaves_nothing"
SHOWN_BY = {
    "decode instance killed": [KILLED_WORKER, IDLE],
    "prefill instance killed": [KILLED_WORKER, IDLE],
    "worker frozen, or its line cut": [
        FROZEN_WORKER,
        FROZEN,
        f"{FAULTS}network.py::test_a_decode_instance_that_is_cut_off_costs_an_attempt_and_no_token",
        CUT_WORKER,
        FROZEN_IDLE,
    ],
    "rank killed": [KILLED_RANK, RANK_IDLE],
    "rank frozen": [FROZEN_RANK, RANK_IDLE],
    "rank's line cut, its worker's not": [
        CUT_RANK,
        f"{FAULTS}network.py::test_only_the_first_requests_wait_for_a_rank_that_is_cut_off_alone",
        f"{FAULTS}network.py::test_a_silence_ends_by_itself_once_the_line_is_mended",
    ],
    "no pair of instances carries KV": [
        "services/router/tests/test_router_pairs.py"
        "::test_whatever_is_shut_every_request_is_placed_on_an_open_pair_or_on_none_and_the_last_is_not_shut_silently"
    ],
    "rank fails again and again": [
        "libs/worker/tests/test_worker_domain.py::test_a_domain_that_fails_too_often_stays_down"
    ],
    "a request lost inside a worker": [FORGOTTEN],
    "credit lost inside a worker": [
        "services/gateway/tests/test_gateway_failures.py::test_credit_that_a_worker_has_lost_is_told_again_in_a_roll_call"
    ],
    "bytes of one instance arrive damaged at another": [
        "libs/worker/tests/test_worker_live.py"
        "::test_damaged_hand_overs_fail_and_their_source_is_reported_as_not_to_be_taken_from",
        "services/router/tests/test_router_pairs.py"
        "::test_a_decode_instance_gets_no_kv_of_a_source_that_it_reports_and_all_of_others",
    ],
    "hand-over broken": [
        "libs/worker/tests/test_worker_faults.py"
        "::test_a_prefill_rank_that_dies_with_the_kv_costs_decode_an_error_and_no_hang"
    ],
    "router killed, frozen or cut off": [KILLED, FROZEN, CUT, IDLE, FROZEN_IDLE],
    "kvstore killed, frozen or cut off": [KILLED, FROZEN, CUT, IDLE, FROZEN_IDLE],
    "kvstore's disk full": [
        REFUSED,
        FULL_DISK,
        "services/kvstore/tests/test_kvstore_store.py::test_a_disk_that_refuses_leaves_earlier_blocks_whole",
    ],
    "kvstore's disk slow": [
        SLOW_DISK,
        STUTTERS,
        "services/kvstore/tests/test_kvstore_parts.py"
        "::test_a_disk_that_stands_still_holds_up_neither_the_loop_nor_calls_past_their_deadline",
    ],
    "object store gone": [
        "services/kvstore/tests/test_kvstore_objects.py::test_a_store_that_cannot_be_reached_costs_hits_only"
    ],
    "block of L2 damaged": [
        "libs/engine/tests/model/test_engine_model_host_pool.py::test_a_flipped_byte_in_a_slot_ends_the_load_before_it"
    ],
    "block on disk damaged": [
        "tests/integration/test_cache_mesh.py::test_bytes_that_change_on_a_stores_disk_cost_hits_and_change_no_token"
    ],
    "gateway killed": [KILLED_GATEWAY, IDLE],
    "gateway frozen": [FROZEN_GATEWAY, FROZEN_IDLE],
    "gateway cut off": [CUT_GATEWAY],
    "client does not read": [DEAF],
    "NATS killed, frozen or cut off": [KILLED, FROZEN, CUT_SERVER, CUT_SERVER_IDLE, IDLE, FROZEN_IDLE],
    "NATS faster than a reader": [
        "libs/mesh/tests/test_mesh_bus.py::test_a_slow_consumer_is_counted_message_by_message_and_logged_once"
    ],
    "etcd killed, frozen or cut off": [
        KILLED,
        FROZEN,
        CUT_SERVER,
        CUT_SERVER_IDLE,
        IDLE,
        FROZEN_IDLE,
        f"{FAULTS}membership.py::test_a_worker_that_only_etcd_has_lost_goes_on_and_registers_again",
    ],
    "etcd lost all its data": [
        f"{FAULTS}membership.py::test_an_etcd_that_lost_all_its_data_costs_no_token",
        f"{FAULTS}idle.py::test_an_etcd_that_loses_all_its_data_in_idle_costs_the_next_requests_nothing",
    ],
    "lease ended, process alive": [*LEASES, LEASE_IDLE],
    "two processes of one instance id": [
        "libs/mesh/tests/test_mesh_membership.py"
        "::test_a_successor_of_the_same_id_is_not_taken_out_by_its_predecessors_end"
    ],
    "worker back at once, at its old address": [IN_PLACE],
    "autoscaler killed, frozen or cut off": [KILLED, FROZEN, CUT, IDLE, FROZEN_IDLE],
    "clock stepped": [
        f"{FAULTS}clock.py::test_no_service_decides_by_the_wall_clock",
        CLOCK,
    ],
    "all workers of a kind gone": [
        f"{FAULTS}kill.py::test_with_no_worker_left_every_request_ends_by_its_deadline_with_a_named_error",
        f"{FAULTS}kill.py::test_begun_requests_go_on_when_the_last_decode_instances_come_back",
    ],
    "drain too short for the work": [
        "libs/worker/tests/test_worker_faults.py::test_what_outlives_the_drain_is_told_so_that_it_is_placed_anew"
    ],
    "decode instance drains": [f"{FAULTS}moves.py::test_what_decodes_on_a_draining_instance_moves_with_all_its_state"],
    "the instance that a request moves to fails": [
        "libs/worker/tests/test_worker_moves.py::test_a_move_that_comes_to_nothing_goes_on_here_and_its_ticket_is_void"
    ],
    "decode instance out of KV memory": [
        f"{FAULTS}overload.py::test_an_output_that_outgrows_every_pool_ends_with_the_limit_and_all_its_tokens_so_far",
        f"{FAULTS}overload.py::test_a_runaway_moves_from_the_instance_that_fills_to_the_one_with_room_and_says_the_same",
    ],
}

LOAD_AND_IDLE = {
    "kill -9 of each service, NATS, etcd": ([KILLED, KILLED_WORKER, KILLED_GATEWAY], [IDLE]),
    "kill -9 of a rank": ([KILLED_RANK], [RANK_IDLE]),
    "SIGSTOP of each service, NATS, etcd": ([FROZEN, FROZEN_WORKER, FROZEN_GATEWAY], [FROZEN_IDLE]),
    "SIGSTOP of a rank": ([FROZEN_RANK], [RANK_IDLE]),
    "network cut of each service": ([CUT, CUT_WORKER, CUT_GATEWAY], [CUT, CUT_WORKER, CUT_GATEWAY]),
    "network cut of a rank": ([CUT_RANK], [CUT_RANK]),
    "network cut of NATS, etcd": ([CUT_SERVER], [CUT_SERVER_IDLE]),
    "lease ended, process alive": (LEASES, [LEASE_IDLE]),
    "clock steps": ([CLOCK], [CLOCK]),
    "full disk": ([FULL_DISK], [REFUSED]),
    "slow disk": ([SLOW_DISK, STUTTERS], [SLOW_DISK]),
    # Who reads nothing is slow only while something comes.
    "slow consumer": ([DEAF], [DEAF]),
    "worker restarted in place under the same address": ([IN_PLACE], [IN_PLACE]),
}
"""What must be survived, with the tests that make it under load, and those that make it while nothing runs."""


def test_every_row_says_what_clients_see_and_what_to_do():
    assert len(rows()) > 20
    for row in rows():
        assert row.fault
        assert row.noticed
        assert row.to_do


def test_its_log_lines_are_written_somewhere():
    for row in rows():
        for line in re.findall(r"`([^`]+)`", row.log):
            assert line in SOURCES, row


def test_its_metrics_are_offered():
    listed = (ROOT / "docs/contracts.md").read_text()
    for row in rows():
        for metric in re.findall(r"`(\w+)`", row.metric):
            assert f"`{metric}`" in listed, row


def test_each_is_shown_by_tests_that_exist():
    assert [row.fault for row in rows()] == list(SHOWN_BY)
    for fault, tests in SHOWN_BY.items():
        assert tests, fault
        assert_exist(tests)


def test_each_fault_is_made_under_load_and_while_nothing_runs():
    shown = {test for tests in SHOWN_BY.values() for test in tests}
    for fault, (under_load, idle) in LOAD_AND_IDLE.items():
        assert under_load, fault
        assert idle, fault
        assert shown.issuperset(under_load + idle), fault


def assert_exist(tests):
    for test in tests:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), test
