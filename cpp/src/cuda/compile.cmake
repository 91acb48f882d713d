# Compiles SOURCE to OBJECT with NVCC and FLAGS (separated by spaces). What the compiler says, the register counts of
# ptxas among it, is kept in OBJECT.txt.
separate_arguments(flags UNIX_COMMAND "${FLAGS}")
execute_process(COMMAND "${NVCC}" ${flags} -c "${SOURCE}" -o "${OBJECT}"
  RESULT_VARIABLE result OUTPUT_VARIABLE text ERROR_VARIABLE text)
file(WRITE "${OBJECT}.txt" "${text}")
if(NOT result EQUAL 0)
  message(FATAL_ERROR "${text}")
endif()
