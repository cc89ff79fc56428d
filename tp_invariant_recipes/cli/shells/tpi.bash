_tpi_completion() {
    local -a answer
    mapfile -t answer < <(
        _TPI_COMPLETE=bash _TPI_LINE="${COMP_LINE:0:COMP_POINT}" _TPI_TEXT="$2" "${1/#\~/$HOME}" 2>/dev/null
    )
    COMPREPLY=("${answer[@]:1}")
    [[ ${answer[0]-} == words ]] && compopt +o default
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
    return 0
}
complete -o default -o nosort -F _tpi_completion tpi
