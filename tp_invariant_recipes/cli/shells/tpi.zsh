#compdef tpi
_tpi() {
    local -a answer partial whole
    local line value
    answer=("${(@f)$(_TPI_COMPLETE=zsh _TPI_LINE="${words[1,CURRENT-1]} $PREFIX" $words[1] 2>/dev/null)}")
    for line in "${(@)answer[2,-1]}"; do
        value=${line%%$'\t'*}
        if [[ $value == *[=.] ]]; then
            partial+=("${value//:/\\:}:${line#*$'\t'}")
        else
            whole+=("${value//:/\\:}:${line#*$'\t'}")
        fi
    done
    (( ${#partial} )) && _describe -V key partial -S ''
    (( ${#whole} )) && _describe -V value whole
    if [[ $answer[1] == files ]]; then
        compset -P '*='
        _files
    fi
}
if [[ $funcstack[1] == _tpi ]]; then _tpi "$@"; else compdef _tpi tpi; fi
