"""The package's declarations of libucc's and libucp's structures, compared with their headers' layouts on x86-64.

The figures were compiled from the headers of UCC 1.0 to 1.10 and UCX 1.13 to 1.22: fields never moved, and structures
only grew. The library would silently read a field in the wrong place as garbage.
"""

import platform

import pytest

from ucc_hetero.native.libraries import ffi

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="needs x86_64 or aarch64")

#: structure -> (least size that any release reads, the fields' offsets).
LAYOUTS = {
    "ucc_lib_params_t": (40, "mask:0 thread_mode:8 coll_types:16"),
    "ucc_lib_attr_t": (40, "mask:0 thread_mode:8 coll_types:16"),
    "ucc_oob_coll_t": (40, "allgather:0 req_test:8 req_free:16 coll_info:24 n_oob_eps:32 oob_ep:36"),
    "ucc_context_params_t": (80, "mask:0 type:8 sync_type:12 oob:16"),
    "ucc_context_attr_t": (40, "mask:0 type:8 sync_type:12 ctx_addr:16 ctx_addr_len:24"),
    "ucc_ep_map_t": (32, "type:0 ep_num:8 array:16"),
    "ucc_team_params_t": (208, "mask:0 flags:8 ep:32 ep_list:40 ep_range:48 ep_map:168 id:200"),
    "ucc_coll_buffer_info_t": (32, "buffer:0 count:8 datatype:16 mem_type:24"),
    "ucc_coll_buffer_info_v_t": (40, "buffer:0 counts:8 displacements:16 datatype:24 mem_type:32"),
    "ucc_coll_args_t": (200, "mask:0 coll_type:8 src:16 dst:56 op:96 flags:104 root:112 error_type:120 tag:124"),
    "ucc_ev_t": (32, "ev_type:0 ev_context:8 ev_context_size:16 req:24"),
    "ucc_ee_params_t": (24, "ee_type:0 ee_context:8 ee_context_size:16"),
    "ucp_params_t": (88, "field_mask:0 features:8 mt_workers_shared:48"),
    "ucp_worker_params_t": (200, "field_mask:0 thread_mode:8"),
    "ucp_ep_params_t": (104, "field_mask:0 address:8 err_mode:16 err_handler:24"),
    "ucp_request_param_t": (
        96,
        "op_attr_mask:0 flags:4 request:8 cb:16 datatype:24 user_data:32 memory_type:48 recv_info:56 memh:64",
    ),
    "ucp_mem_map_params_t": (48, "field_mask:0 address:8 length:16 flags:24 prot:28 memory_type:32"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_fields_are_where_the_headers_have_them(name):
    size, fields = LAYOUTS[name]
    assert ffi.sizeof(name) >= size, "libraries copy this many bytes"
    offsets = dict(field.split(":") for field in fields.split())
    assert {field: str(ffi.offsetof(name, field)) for field in offsets} == offsets
    assert ffi.sizeof("ucs_status_t") == 1
