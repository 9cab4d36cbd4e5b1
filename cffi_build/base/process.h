/* Processes of this host (process.c). */
#ifndef UCCH_PROCESS_H
#define UCCH_PROCESS_H

#include "base/ucch.h"

void ucch_process_signal(int pid, int number);
void ucch_process_unbind_thread(void);

#endif
