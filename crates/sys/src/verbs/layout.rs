//! Sizes, alignments and offsets as a C compiler for x86-64 Linux finds them in `infiniband/verbs.h` of rdma-core 44
//! (`sizeof`, `_Alignof`, `offsetof`). A declaration that differs does not compile.

use std::mem::{align_of, offset_of, size_of};

use super::objects::*;
use super::types::*;

macro_rules! layout {
    ($($name:ident: $size:literal, $align:literal { $($field:ident: $offset:literal),* $(,)? })+) => {$(
        const _: () = {
            assert!(size_of::<$name>() == $size);
            assert!(align_of::<$name>() == $align);
            $(assert!(offset_of!($name, $field) == $offset);)*
        };
    )+};
}

layout! {
    ibv_gid: 16, 8 { raw: 0 }
    ibv_gid_entry: 32, 8 { gid: 0, gid_index: 16, port_num: 20, gid_type: 24, ndev_ifindex: 28 }
    ibv_device_attr: 232, 8 {
        fw_ver: 0, node_guid: 64, sys_image_guid: 72, max_mr_size: 80, page_size_cap: 88, vendor_id: 96,
        vendor_part_id: 100, hw_ver: 104, max_qp: 108, max_qp_wr: 112, device_cap_flags: 116, max_sge: 120,
        max_sge_rd: 124, max_cq: 128, max_cqe: 132, max_mr: 136, max_pd: 140, max_qp_rd_atom: 144, max_ee_rd_atom:
        148, max_res_rd_atom: 152, max_qp_init_rd_atom: 156, max_ee_init_rd_atom: 160, atomic_cap: 164, max_ee: 168,
        max_rdd: 172, max_mw: 176, max_raw_ipv6_qp: 180, max_raw_ethy_qp: 184, max_mcast_grp: 188,
        max_mcast_qp_attach: 192, max_total_mcast_qp_attach: 196, max_ah: 200, max_fmr: 204, max_map_per_fmr: 208,
        max_srq: 212, max_srq_wr: 216, max_srq_sge: 220, max_pkeys: 224, local_ca_ack_delay: 226, phys_port_cnt: 227,
    }
    ibv_query_device_ex_input: 4, 4 { comp_mask: 0 }
    ibv_odp_caps: 24, 8 { general_caps: 0, per_transport_caps: 8 }
    ibv_tso_caps: 8, 4 { max_tso: 0, supported_qpts: 4 }
    ibv_rss_caps: 32, 8 {
        supported_qpts: 0, max_rwq_indirection_tables: 4, max_rwq_indirection_table_size: 8, rx_hash_fields_mask: 16,
        rx_hash_function: 24,
    }
    ibv_packet_pacing_caps: 12, 4 { qp_rate_limit_min: 0, qp_rate_limit_max: 4, supported_qpts: 8 }
    ibv_tm_caps: 20, 4 { max_rndv_hdr_size: 0, max_num_tags: 4, flags: 8, max_ops: 12, max_sge: 16 }
    ibv_cq_moderation_caps: 4, 2 { max_cq_count: 0, max_cq_period: 2 }
    ibv_pci_atomic_caps: 6, 2 { fetch_add: 0, swap: 2, compare_swap: 4 }
    ibv_device_attr_ex: 400, 8 {
        orig_attr: 0, comp_mask: 232, odp_caps: 240, completion_timestamp_mask: 264, hca_core_clock: 272,
        device_cap_flags_ex: 280, tso_caps: 288, rss_caps: 296, max_wq_type_rq: 328, packet_pacing_caps: 332,
        raw_packet_caps: 344, tm_caps: 348, cq_mod_caps: 368, max_dm_size: 376, pci_atomic_caps: 384, xrc_odp_caps:
        392, phys_port_cnt_ex: 396,
    }
    ibv_port_attr: 52, 4 {
        state: 0, max_mtu: 4, active_mtu: 8, gid_tbl_len: 12, port_cap_flags: 16, max_msg_sz: 20, bad_pkey_cntr: 24,
        qkey_viol_cntr: 28, pkey_tbl_len: 32, lid: 34, sm_lid: 36, lmc: 38, max_vl_num: 39, sm_sl: 40, subnet_timeout:
        41, init_type_reply: 42, active_width: 43, active_speed: 44, phys_state: 45, link_layer: 46, flags: 47,
        port_cap_flags2: 48,
    }
    ibv_async_event: 16, 8 { element: 0, event_type: 8 }
    ibv_wc: 48, 8 {
        wr_id: 0, status: 8, opcode: 12, vendor_err: 16, byte_len: 20, imm_data: 24, qp_num: 28, src_qp: 32, wc_flags:
        36, pkey_index: 40, slid: 42, sl: 44, dlid_path_bits: 45,
    }
    ibv_global_route: 24, 8 { dgid: 0, flow_label: 16, sgid_index: 20, hop_limit: 21, traffic_class: 22 }
    ibv_grh: 40, 8 { version_tclass_flow: 0, paylen: 4, next_hdr: 6, hop_limit: 7, sgid: 8, dgid: 24 }
    ibv_ah_attr: 32, 8 { grh: 0, dlid: 24, sl: 26, src_path_bits: 27, static_rate: 28, is_global: 29, port_num: 30 }
    ibv_srq_attr: 12, 4 { max_wr: 0, max_sge: 4, srq_limit: 8 }
    ibv_srq_init_attr: 24, 8 { srq_context: 0, attr: 8 }
    ibv_qp_cap: 20, 4 { max_send_wr: 0, max_recv_wr: 4, max_send_sge: 8, max_recv_sge: 12, max_inline_data: 16 }
    ibv_qp_init_attr: 64, 8 { qp_context: 0, send_cq: 8, recv_cq: 16, srq: 24, cap: 32, qp_type: 52, sq_sig_all: 56 }
    ibv_qp_attr: 144, 8 {
        qp_state: 0, cur_qp_state: 4, path_mtu: 8, path_mig_state: 12, qkey: 16, rq_psn: 20, sq_psn: 24, dest_qp_num:
        28, qp_access_flags: 32, cap: 36, ah_attr: 56, alt_ah_attr: 88, pkey_index: 120, alt_pkey_index: 122,
        en_sqd_async_notify: 124, sq_draining: 125, max_rd_atomic: 126, max_dest_rd_atomic: 127, min_rnr_timer: 128,
        port_num: 129, timeout: 130, retry_cnt: 131, rnr_retry: 132, alt_port_num: 133, alt_timeout: 134, rate_limit:
        136,
    }
    ibv_sge: 16, 8 { addr: 0, length: 8, lkey: 12 }
    ibv_send_wr: 128, 8 {
        wr_id: 0, next: 8, sg_list: 16, num_sge: 24, opcode: 28, send_flags: 32, imm_data: 36, wr: 40, remote_srqn:
        72, reserved: 80,
    }
    ibv_recv_wr: 32, 8 { wr_id: 0, next: 8, sg_list: 16, num_sge: 24 }
    ibv_device: 664, 8 {
        _ops: 0, node_type: 16, transport_type: 20, name: 24, dev_name: 88, dev_path: 152, ibdev_path: 408,
    }
    ibv_context_ops: 256, 8 {
        _compat_query_device: 0, _compat_query_port: 8, _compat_alloc_pd: 16, _compat_dealloc_pd: 24, _compat_reg_mr:
        32, _compat_rereg_mr: 40, _compat_dereg_mr: 48, alloc_mw: 56, bind_mw: 64, dealloc_mw: 72, _compat_create_cq:
        80, poll_cq: 88, req_notify_cq: 96, _compat_cq_event: 104, _compat_resize_cq: 112, _compat_destroy_cq: 120,
        _compat_create_srq: 128, _compat_modify_srq: 136, _compat_query_srq: 144, _compat_destroy_srq: 152,
        post_srq_recv: 160, _compat_create_qp: 168, _compat_query_qp: 176, _compat_modify_qp: 184, _compat_destroy_qp:
        192, post_send: 200, post_recv: 208, _compat_create_ah: 216, _compat_destroy_ah: 224, _compat_attach_mcast:
        232, _compat_detach_mcast: 240, _compat_async_event: 248,
    }
    ibv_context: 328, 8 {
        device: 0, ops: 8, cmd_fd: 264, async_fd: 268, num_comp_vectors: 272, mutex: 280, abi_compat: 320,
    }
    verbs_context: 648, 8 {
        query_port: 0, _from_advise_mr_to_create_cq_ex: 8, _priv: 208, query_device_ex: 216,
        _from_destroy_flow_to_close_xrcd: 224, _abi_placeholder3: 304, sz: 312, context: 320,
    }
    ibv_pd: 16, 8 { context: 0, handle: 8 }
    ibv_mr: 48, 8 { context: 0, pd: 8, addr: 16, length: 24, handle: 32, lkey: 36, rkey: 40 }
    ibv_ah: 24, 8 { context: 0, pd: 8, handle: 16 }
    ibv_comp_channel: 16, 8 { context: 0, fd: 8, refcnt: 12 }
    ibv_cq: 128, 8 {
        context: 0, channel: 8, cq_context: 16, handle: 24, cqe: 28, mutex: 32, cond: 72, comp_events_completed: 120,
        async_events_completed: 124,
    }
    ibv_srq: 128, 8 { context: 0, srq_context: 8, pd: 16, handle: 24, mutex: 32, cond: 72, events_completed: 120 }
    ibv_qp: 160, 8 {
        context: 0, qp_context: 8, pd: 16, send_cq: 24, recv_cq: 32, srq: 40, handle: 48, qp_num: 52, state: 56,
        qp_type: 60, mutex: 64, cond: 104, events_completed: 152,
    }
    ibv_wr_rdma: 16, 8 { remote_addr: 0, rkey: 8 }
    ibv_wr_atomic: 32, 8 { remote_addr: 0, compare_add: 8, swap: 16, rkey: 24 }
    ibv_wr_ud: 16, 8 { ah: 0, remote_qpn: 8, remote_qkey: 12 }
    ibv_odp_per_transport_caps: 12, 4 { rc_odp_caps: 0, uc_odp_caps: 4, ud_odp_caps: 8 }
    ibv_send_wr_target: 32, 8 {}
    ibv_async_event_element: 8, 8 {}
}
