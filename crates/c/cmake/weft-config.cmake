# find_package(weft) gives weft::weft, the shared library, and weft::static, the other one, where that is installed.
get_filename_component(_weft_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

if(NOT TARGET weft::weft)
  add_library(weft::weft SHARED IMPORTED)
  set_target_properties(weft::weft PROPERTIES
    IMPORTED_LOCATION "${_weft_prefix}/lib/libweft.so"
    IMPORTED_SONAME "libweft.so"
    INTERFACE_INCLUDE_DIRECTORIES "${_weft_prefix}/include")
endif()

if(NOT TARGET weft::static AND EXISTS "${_weft_prefix}/lib/libweft.a")
  add_library(weft::static STATIC IMPORTED)
  set_target_properties(weft::static PROPERTIES
    IMPORTED_LOCATION "${_weft_prefix}/lib/libweft.a"
    INTERFACE_INCLUDE_DIRECTORIES "${_weft_prefix}/include"
    INTERFACE_LINK_LIBRARIES "gcc_s;util;rt;pthread;m;dl")
endif()

unset(_weft_prefix)
