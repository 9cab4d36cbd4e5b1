/* The way to another host, as our kernel knows it (path.c). */
#ifndef UCCH_PATH_H
#define UCCH_PATH_H

#include "base/ucch.h"

int ucch_path_is_cut(const void *address, size_t bytes, double patience);
void ucch_path_name(const void *address, size_t bytes, char *text);
int ucch_path_find_cut(const void *addresses, size_t bytes, double patience, char *text);

#endif
