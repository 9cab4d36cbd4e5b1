/* Every function of UCC and UCX that ucc_hetero calls: _SYMBOL(return type, name, (parameters), (arguments)).
 *
 * The list makes the symbol tables (loader.c), the call-through functions (calls.h) and the cdef (build.py). UCC 1.1
 * and UCX 1.13 have all of these functions; a library that lacks one is refused. */

/* clang-format off */

#ifndef UCC_SYMBOL
#define UCC_SYMBOL(ret, name, params, args)
#endif
#ifndef UCP_SYMBOL
#define UCP_SYMBOL(ret, name, params, args)
#endif

UCC_SYMBOL(const char *, ucc_get_version_string, (void), ())
UCC_SYMBOL(ucc_status_t, ucc_lib_config_read, (const char *prefix, const char *file, ucc_lib_config_h *config), (prefix, file, config))
UCC_SYMBOL(ucc_status_t, ucc_init_version, (unsigned major, unsigned minor, const ucc_lib_params_t *params, ucc_lib_config_h config, ucc_lib_h *lib), (major, minor, params, config, lib))
UCC_SYMBOL(ucc_status_t, ucc_finalize, (ucc_lib_h lib), (lib))
UCC_SYMBOL(ucc_status_t, ucc_lib_get_attr, (ucc_lib_h lib, ucc_lib_attr_t *attr), (lib, attr))
UCC_SYMBOL(ucc_status_t, ucc_context_config_read, (ucc_lib_h lib, const char *file, ucc_context_config_h *config), (lib, file, config))
UCC_SYMBOL(ucc_status_t, ucc_context_config_modify, (ucc_context_config_h config, const char *component, const char *name, const char *value), (config, component, name, value))
UCC_SYMBOL(ucc_status_t, ucc_context_create, (ucc_lib_h lib, const ucc_context_params_t *params, ucc_context_config_h config, ucc_context_h *context), (lib, params, config, context))
UCC_SYMBOL(ucc_status_t, ucc_context_progress, (ucc_context_h context), (context))
UCC_SYMBOL(ucc_status_t, ucc_context_destroy, (ucc_context_h context), (context))
UCC_SYMBOL(ucc_status_t, ucc_context_get_attr, (ucc_context_h context, ucc_context_attr_t *attr), (context, attr))
UCC_SYMBOL(ucc_status_t, ucc_team_create_post, (ucc_context_h *contexts, uint32_t n, const ucc_team_params_t *params, ucc_team_h *team), (contexts, n, params, team))
UCC_SYMBOL(ucc_status_t, ucc_team_create_test, (ucc_team_h team), (team))
UCC_SYMBOL(ucc_status_t, ucc_team_destroy, (ucc_team_h team), (team))
UCC_SYMBOL(ucc_status_t, ucc_collective_init, (ucc_coll_args_t *args, ucc_coll_req_h *request, ucc_team_h team), (args, request, team))
UCC_SYMBOL(ucc_status_t, ucc_collective_post, (ucc_coll_req_h request), (request))
UCC_SYMBOL(ucc_status_t, ucc_collective_finalize, (ucc_coll_req_h request), (request))
UCC_SYMBOL(ucc_status_t, ucc_collective_triggered_post, (ucc_ee_h ee, ucc_ev_t *event), (ee, event))
UCC_SYMBOL(ucc_status_t, ucc_ee_create, (ucc_team_h team, const ucc_ee_params_t *params, ucc_ee_h *ee), (team, params, ee))
UCC_SYMBOL(ucc_status_t, ucc_ee_destroy, (ucc_ee_h ee), (ee))
UCC_SYMBOL(ucc_status_t, ucc_ee_get_event, (ucc_ee_h ee, ucc_ev_t **event), (ee, event))
UCC_SYMBOL(ucc_status_t, ucc_ee_ack_event, (ucc_ee_h ee, ucc_ev_t *event), (ee, event))

UCP_SYMBOL(const char *, ucp_get_version_string, (void), ())
UCP_SYMBOL(ucs_status_t, ucp_config_read, (const char *prefix, const char *file, ucp_config_t **config), (prefix, file, config))
UCP_SYMBOL(ucs_status_t, ucp_config_modify, (ucp_config_t *config, const char *name, const char *value), (config, name, value))
UCP_SYMBOL(ucs_status_t, ucp_init_version, (unsigned major, unsigned minor, const ucp_params_t *params, const ucp_config_t *config, ucp_context_h *context), (major, minor, params, config, context))
UCP_SYMBOL(ucs_status_t, ucp_context_query, (ucp_context_h context, ucp_context_attr_t *attr), (context, attr))
UCP_SYMBOL(ucs_status_t, ucp_worker_create, (ucp_context_h context, const ucp_worker_params_t *params, ucp_worker_h *worker), (context, params, worker))
UCP_SYMBOL(ucs_status_t, ucp_worker_get_address, (ucp_worker_h worker, void **address, size_t *length), (worker, address, length))
UCP_SYMBOL(ucs_status_t, ucp_ep_create, (ucp_worker_h worker, const ucp_ep_params_t *params, ucp_ep_h *ep), (worker, params, ep))
UCP_SYMBOL(ucs_status_t, ucp_request_check_status, (void *request), (request))
UCP_SYMBOL(ucs_status_t, ucp_mem_map, (ucp_context_h context, const ucp_mem_map_params_t *params, ucp_mem_h *memh), (context, params, memh))
UCP_SYMBOL(ucs_status_t, ucp_mem_unmap, (ucp_context_h context, ucp_mem_h memh), (context, memh))
UCP_SYMBOL(ucs_status_t, ucp_rkey_pack, (ucp_context_h context, ucp_mem_h memh, void **rkey, size_t *size), (context, memh, rkey, size))
UCP_SYMBOL(ucs_status_t, ucp_ep_rkey_unpack, (ucp_ep_h ep, const void *buffer, ucp_rkey_h *rkey), (ep, buffer, rkey))
UCP_SYMBOL(ucs_status_ptr_t, ucp_ep_flush_nbx, (ucp_ep_h ep, const ucp_request_param_t *param), (ep, param))
UCP_SYMBOL(ucs_status_ptr_t, ucp_ep_close_nbx, (ucp_ep_h ep, const ucp_request_param_t *param), (ep, param))
UCP_SYMBOL(ucs_status_ptr_t, ucp_tag_send_nbx, (ucp_ep_h ep, const void *buffer, size_t count, ucp_tag_t tag, const ucp_request_param_t *param), (ep, buffer, count, tag, param))
UCP_SYMBOL(ucs_status_ptr_t, ucp_tag_send_sync_nbx, (ucp_ep_h ep, const void *buffer, size_t count, ucp_tag_t tag, const ucp_request_param_t *param), (ep, buffer, count, tag, param))
UCP_SYMBOL(ucs_status_ptr_t, ucp_tag_recv_nbx, (ucp_worker_h worker, void *buffer, size_t count, ucp_tag_t tag, ucp_tag_t mask, const ucp_request_param_t *param), (worker, buffer, count, tag, mask, param))
UCP_SYMBOL(ucs_status_ptr_t, ucp_tag_msg_recv_nbx, (ucp_worker_h worker, void *buffer, size_t count, ucp_tag_message_h message, const ucp_request_param_t *param), (worker, buffer, count, message, param))
UCP_SYMBOL(ucs_status_ptr_t, ucp_put_nbx, (ucp_ep_h ep, const void *buffer, size_t count, uint64_t address, ucp_rkey_h rkey, const ucp_request_param_t *param), (ep, buffer, count, address, rkey, param))
UCP_SYMBOL(ucs_status_ptr_t, ucp_get_nbx, (ucp_ep_h ep, void *buffer, size_t count, uint64_t address, ucp_rkey_h rkey, const ucp_request_param_t *param), (ep, buffer, count, address, rkey, param))
UCP_SYMBOL(ucs_status_t, ucp_worker_set_am_recv_handler, (ucp_worker_h worker, const ucp_am_handler_param_t *param), (worker, param))
UCP_SYMBOL(ucs_status_ptr_t, ucp_am_send_nbx, (ucp_ep_h ep, unsigned id, const void *header, size_t header_length, const void *buffer, size_t count, const ucp_request_param_t *param), (ep, id, header, header_length, buffer, count, param))
UCP_SYMBOL(ucs_status_ptr_t, ucp_am_recv_data_nbx, (ucp_worker_h worker, void *data, void *buffer, size_t count, const ucp_request_param_t *param), (worker, data, buffer, count, param))
UCP_SYMBOL(ucs_status_t, ucp_worker_get_efd, (ucp_worker_h worker, int *fd), (worker, fd))
UCP_SYMBOL(ucs_status_t, ucp_worker_arm, (ucp_worker_h worker), (worker))
UCP_SYMBOL(ucp_tag_message_h, ucp_tag_probe_nb, (ucp_worker_h worker, ucp_tag_t tag, ucp_tag_t mask, int remove, ucp_tag_recv_info_t *info), (worker, tag, mask, remove, info))
UCP_SYMBOL(unsigned, ucp_worker_progress, (ucp_worker_h worker), (worker))
UCP_SYMBOL(void, ucp_get_version, (unsigned *major, unsigned *minor, unsigned *release), (major, minor, release))
UCP_SYMBOL(void, ucp_config_release, (ucp_config_t *config), (config))
UCP_SYMBOL(void, ucp_context_print_info, (ucp_context_h context, FILE *stream), (context, stream))
UCP_SYMBOL(void, ucp_cleanup, (ucp_context_h context), (context))
UCP_SYMBOL(void, ucp_worker_destroy, (ucp_worker_h worker), (worker))
UCP_SYMBOL(void, ucp_worker_release_address, (ucp_worker_h worker, void *address), (worker, address))
UCP_SYMBOL(void, ucp_request_free, (void *request), (request))
UCP_SYMBOL(void, ucp_request_cancel, (ucp_worker_h worker, void *request), (worker, request))
UCP_SYMBOL(void, ucp_rkey_buffer_release, (void *buffer), (buffer))
UCP_SYMBOL(void, ucp_rkey_destroy, (ucp_rkey_h rkey), (rkey))

UCC_SYMBOL(void, ucc_get_version, (unsigned *major, unsigned *minor, unsigned *release), (major, minor, release))
UCC_SYMBOL(void, ucc_lib_config_release, (ucc_lib_config_h config), (config))
UCC_SYMBOL(void, ucc_context_config_release, (ucc_context_config_h config), (config))

#undef UCC_SYMBOL
#undef UCP_SYMBOL
