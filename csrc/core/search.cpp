namespace rvdcomm {}
